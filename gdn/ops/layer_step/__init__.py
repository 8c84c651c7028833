"""What a Gated DeltaNet layer computes around the delta rule, operator by operator, and its whole prefill and decode steps."""
