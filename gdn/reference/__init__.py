"""References of the operators in plain torch, on any device: the public names and arguments without `backend`."""
