"""Parts of a sequence over the ranks of a group: what runs between the passes of `gdn.distributed`."""
