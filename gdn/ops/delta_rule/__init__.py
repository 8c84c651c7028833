"""The gated delta rule: its chunk and its recurrent form, both in one call, and replay decode."""
