"""The gRPC agent: client, server, codec, network and control messages, put together."""
