"""`gdn demo`: a hybrid model in an engine, every operator checked, and what it says of them."""
