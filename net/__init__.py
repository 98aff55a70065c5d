"""What c10d and rpc stand on: addresses, sockets, credentials, the event loop of gRPC, and what forks inherit."""
