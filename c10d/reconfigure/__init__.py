"""How processes agree, through their store, on which of them form a group anew."""
