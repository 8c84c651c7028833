"""What every public operator needs: the decorator, the memo of repeated calls, checks, torch.library, `gdn.explain`.

Checks of arguments: `check` (shapes, dtypes, devices), `kinds` (types, from annotations), `values` (contents of tensors),
`overlap` (memory that arguments share), `written` (views that a compiler would write to another place); `tensors` makes copies
where a kernel needs another layout. `tunable` is how the tuner, the benchmark and the tests see an operator.
"""
