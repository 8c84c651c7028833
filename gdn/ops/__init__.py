"""The public operators: contract, validation, allocation, one call into the runtime.

Checks of arguments: `_check` (shapes, dtypes, devices), `_kinds` (types, from annotations), `_values` (contents of tensors),
`_overlap` (memory that arguments share), `_written` (views that a compiler would write to another place); `_tensors` makes copies
where a kernel needs another layout.
"""
