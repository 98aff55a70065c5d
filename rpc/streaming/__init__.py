"""`rpc_stream`: the items that a remote function yields, one by one."""
