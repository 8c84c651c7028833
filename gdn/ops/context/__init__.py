"""Parts of a sequence over the ranks of a group: what runs between the passes of `gdn.distributed`."""

from gdn.runtime.registry import Family, Operator, modules

# They have no cases: nothing tunes them.
_CONTEXT = Family("", "tests.compile.variants.context", "gdn.ops.context.examples")

OPERATORS = (
    Operator("context_parts", _CONTEXT, (), modules("context.parts", "cute")),
    Operator("context_total", _CONTEXT, (), modules("context.total", "cute")),
    Operator("context_start", _CONTEXT, (), modules("context.start", "cute")),
)
