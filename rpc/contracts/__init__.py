"""What every room of `gradwire.rpc` may import: the contract of an agent, messages, options and workers."""
