"""`rpc_stream`: the items that a remote generator yields, one by one."""
