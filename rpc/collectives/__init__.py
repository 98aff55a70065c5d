"""`all_gather` and `barrier` among workers, over messages or over a process group."""
