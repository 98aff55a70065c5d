"""`all_gather` and `barrier` among workers."""
