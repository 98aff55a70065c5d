"""`all_gather` and `barrier` among workers, by messages or through a process group."""
