"""The sample operator's own tests run in a copy of the project, where its modules are."""

collect_ignore = ["files"]
