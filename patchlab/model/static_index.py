"""What one source file of transformers says about its classes, read with `ast` and never run.

The reader collects *facts*: which class names stand in the value that an `__init__` gives to which
attribute, what locals, helper functions and class attributes bring in, how `__init__` and `forward`
are called. It resolves nothing; `class_graph` puts the facts of all files together. Facts are
over-inclusive on purpose (both branches of a condition, every entry of a dispatch dict): the
question asked of them is what a class *can* hold under some config.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

# Names read inside these calls are tested, logged or counted, not constructed.
_NOT_CONSTRUCTING = frozenset(
    {
        *("isinstance", "issubclass", "hasattr", "super", "ValueError"),
        *("len", "range", "int", "float", "str", "bool", "sum", "min", "max", "abs", "round"),
        *("nn.Parameter", "torch.nn.Parameter"),
    }
)
_JOINING = (ast.Add, ast.Mult, ast.BitOr)  # of lists and dicts; what else is reckoned is a number
_MODULE_WRAPPERS = ("torch.nn.", "torch.jit.", "torch.compile")
_COLLECTING = frozenset({"append", "extend", "insert", "add_module", "register_module", "update"})
# Methods that build something when a base class in another file calls them from its `__init__`.
_BUILDER_PREFIXES = ("_make", "_build", "_create", "_get", "_init", "make_", "build_", "create_")
_NEVER_BUILDERS = frozenset({"_init_weights", "_init_weights_impl"})


@dataclass(slots=True)
class Refs:
    """The names that stand in an expression.

    Attributes:
        names: Dotted names, called or read ("nn.Linear", "self.attention_class").
        autos: Calls of an Auto class with the text of their first argument.
        passed: Names given to a constructor: `(callee, position or keyword, name)`.
    """

    names: set[str] = field(default_factory=set)
    autos: set[tuple[str, str]] = field(default_factory=set)
    passed: set[tuple[str, int | str, str]] = field(default_factory=set)

    def update(self, other: Refs) -> None:
        """Add another expression's names."""
        self.names |= other.names
        self.autos |= other.autos
        self.passed |= other.passed

    def __bool__(self) -> bool:
        return bool(self.names or self.autos)


@dataclass(slots=True)
class FunctionFacts:
    """What a function or method assigns, in order.

    Attributes:
        parameters: Names, without `self`.
        assigned: `(attribute of self, its value)`; "" where the value goes to no attribute of self.
        always: Attributes assigned outside any condition or loop.
        deleted: Attributes removed by `del self.x`.
        local: Local name to what it may be made of, parameters' defaults included.
        returned: What stands in the return statements.
        calls_super: Whether `super().__init__` is called.
        initializes: Bases whose `__init__` is called by name.
        annotations: Parameter to the text of its annotation.
    """

    parameters: tuple[str, ...] = ()
    assigned: list[tuple[str, Refs]] = field(default_factory=list)
    always: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    local: dict[str, Refs] = field(default_factory=dict)
    returned: Refs = field(default_factory=Refs)
    calls_super: bool = False
    initializes: list[str] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ClassFacts:
    """One class statement."""

    name: str
    bases: tuple[str, ...]
    attributes: dict[str, Refs] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    methods: dict[str, FunctionFacts] = field(default_factory=dict)
    init: str | None = None
    forward: str | None = None


@dataclass(slots=True)
class FileFacts:
    """One Python module: its classes, imports, top-level names and functions."""

    python_module: str
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    assigned: dict[str, Refs] = field(default_factory=dict)
    functions: dict[str, FunctionFacts] = field(default_factory=dict)


def read_source(source: str, python_module: str, *, is_package: bool = False) -> FileFacts:
    """Collect the facts of one file.

    Raises:
        SyntaxError: The file is no Python that this interpreter can parse.
    """
    facts = FileFacts(python_module)
    parents = python_module.split(".") if is_package else python_module.split(".")[:-1]
    functions: dict[str, ast.FunctionDef] = {}
    _read_top(ast.parse(source).body, facts, parents, functions)
    for name, node in functions.items():
        facts.functions[name] = read_function(node, is_method=False)
    return facts


def _read_top(
    body: Iterable[ast.stmt],
    facts: FileFacts,
    parents: list[str],
    functions: dict[str, ast.FunctionDef],
) -> None:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _read_import(node, parents, facts.imports)
        elif isinstance(node, ast.ClassDef):
            _read_class(node, facts)
        elif isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        elif isinstance(node, ast.Assign):
            refs = refs_of(node.value)
            for target in node.targets:
                if isinstance(target, ast.Name):
                    facts.assigned.setdefault(target.id, Refs()).update(refs)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            facts.assigned.setdefault(node.target.id, Refs()).update(refs_of(node.value))
        elif isinstance(node, (ast.If, ast.Try)):
            _read_top(node.body, facts, parents, functions)
            _read_top(node.orelse, facts, parents, functions)
            for handler in getattr(node, "handlers", ()):
                _read_top(handler.body, facts, parents, functions)


def _read_import(
    node: ast.Import | ast.ImportFrom, parents: list[str], imports: dict[str, str]
) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            imports[alias.asname or name] = name
        return
    origin = parents[: len(parents) - node.level + 1] if node.level else []
    if node.module:
        origin = [*origin, node.module]
    for alias in node.names:
        imports[alias.asname or alias.name] = ".".join([*origin, alias.name])


def _read_class(node: ast.ClassDef, facts: FileFacts) -> None:
    found = ClassFacts(node.name, tuple(dotted_name(base) or "?" for base in node.bases))
    methods: dict[str, ast.FunctionDef] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            methods[item.name] = item
        elif isinstance(item, ast.Assign):
            for target in item.targets:
                if isinstance(target, ast.Name):
                    found.attributes[target.id] = refs_of(item.value)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.annotations[item.target.id] = ast.unparse(item.annotation)
            if item.value is not None:
                found.attributes[item.target.id] = refs_of(item.value)
        elif isinstance(item, ast.ClassDef):
            _read_class(item, facts)
    if "__init__" in methods:
        found.init = signature_of(methods["__init__"])
    if "forward" in methods:
        found.forward = signature_of(methods["forward"])
    # Reading every method takes twice as long: only those that `__init__` reaches are read, and
    # those whose name says that a base class may call them to build something.
    waiting = ["__init__"] + [
        name
        for name in methods
        if name.startswith(_BUILDER_PREFIXES) and name not in _NEVER_BUILDERS
    ]
    while waiting:
        name = waiting.pop()
        if name in found.methods or name not in methods:
            continue
        method = read_function(methods[name], is_method=True)
        found.methods[name] = method
        reached = {ref for _, refs in method.assigned for ref in refs.names} | method.returned.names
        for refs in method.local.values():
            reached |= refs.names
        waiting.extend(ref[5:] for ref in reached if ref.startswith("self."))
    facts.classes[node.name] = found


def dotted_name(node: ast.expr) -> str | None:
    """Return "a.b.c" for a chain of attributes on a name; subscripts (generics) are left out."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Name):
            parts.append(node.id)
            return ".".join(reversed(parts))
        else:
            return None


def signature_of(node: ast.FunctionDef) -> str:
    """Write a signature as "config, layer_idx=, *, cache=, **kwargs"; `=` marks a default."""
    arguments = node.args
    names = [*arguments.posonlyargs, *arguments.args]
    first_default = len(names) - len(arguments.defaults)
    parts = [a.arg + "=" * (i >= first_default) for i, a in enumerate(names)][1:]
    if arguments.vararg:
        parts.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        parts.append("*")
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(a.arg + "=" * (default is not None))
    if arguments.kwarg:
        parts.append("**" + arguments.kwarg.arg)
    return ", ".join(parts)


def refs_of(expression: ast.expr | None) -> Refs:
    """Collect the names of an expression."""
    refs = Refs()
    stack: list[ast.AST] = [] if expression is None else [expression]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Call):
            name = dotted_name(node.func)
            if name in _NOT_CONSTRUCTING or _makes_tensor(name):
                continue
            if isinstance(node.func, ast.Subscript) or name is None:
                stack.append(node.func)
            else:
                refs.names.add(name)
                _read_call(node, name, refs)
            stack.extend(node.args)
            stack.extend(keyword.value for keyword in node.keywords)
        elif isinstance(node, ast.Name):
            refs.names.add(node.id)
        elif isinstance(node, ast.Attribute):
            name = dotted_name(node)
            if name is None:
                stack.append(node.value)
            else:
                refs.names.add(name)
                if isinstance(node.value, ast.Subscript):
                    stack.append(node.value)
        elif isinstance(node, ast.IfExp):
            # The test chooses and constructs nothing.
            stack += [node.body, node.orelse]
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, _JOINING):
            continue
        elif not isinstance(node, (ast.Constant, ast.Compare, ast.Slice)):
            stack.extend(ast.iter_child_nodes(node))
    return refs


def _makes_tensor(name: str | None) -> bool:
    return name is not None and name.startswith("torch.") and not name.startswith(_MODULE_WRAPPERS)


def _read_call(node: ast.Call, name: str, refs: Refs) -> None:
    if name.startswith("Auto") or name == "load_backbone":
        config = next(
            (k.value for k in node.keywords if k.arg == "config"),
            node.args[0] if node.args else None,
        )
        refs.autos.add((name, ast.unparse(config) if config is not None else ""))
    if name.startswith("nn."):
        return  # torch's own keep what they are given in the attribute at hand
    given: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
    given += [(k.arg, k.value) for k in node.keywords if k.arg is not None]
    for key, value in given:
        if not isinstance(value, ast.Constant):
            refs.passed |= {(name, key, passed) for passed in refs_of(value).names}


def read_function(node: ast.FunctionDef, *, is_method: bool) -> FunctionFacts:
    """Collect what a function assigns to `self`, to locals, and returns."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    facts = FunctionFacts(tuple(a.arg for a in named)[int(is_method) :])
    facts.annotations = {
        a.arg: ast.unparse(a.annotation) for a in named if a.annotation and a.arg.endswith("config")
    }
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    defaults = [
        *zip(with_default, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in defaults:
        if refs := refs_of(default):
            facts.local[argument.arg] = refs
    _read_body(node.body, facts, always=True)
    return facts


def _read_body(body: Iterable[ast.stmt], facts: FunctionFacts, *, always: bool) -> None:
    for node in body:
        if isinstance(node, ast.Assign):
            refs = refs_of(node.value)
            for target in node.targets:
                parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                for part in parts:
                    _assign(part, refs, facts, always=always)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            if node.value is not None:
                plain = always and isinstance(node, ast.AnnAssign)
                _assign(node.target, refs_of(node.value), facts, always=plain)
        elif isinstance(node, ast.Expr):
            _read_statement(node.value, facts)
        elif isinstance(node, ast.Return):
            facts.returned.update(refs_of(node.value))
        elif isinstance(node, ast.Delete):
            names = [dotted_name(target) for target in node.targets]
            facts.deleted |= {n[5:] for n in names if n and n.startswith("self.")}
        elif isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef)):
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                facts.local.setdefault(node.target.id, Refs()).update(refs_of(node.iter))
            inner = always and isinstance(node, ast.With)
            _read_body(node.body, facts, always=inner)
            _read_body(getattr(node, "orelse", ()), facts, always=False)
            _read_body(getattr(node, "finalbody", ()), facts, always=False)
            for handler in getattr(node, "handlers", ()):
                _read_body(handler.body, facts, always=False)


def _assign(target: ast.expr, refs: Refs, facts: FunctionFacts, *, always: bool) -> None:
    name = dotted_name(target)
    if name is None:
        return
    if name == "self" and isinstance(target, ast.Subscript):  # in a subclass of ModuleDict
        facts.assigned.append(("*", refs))
    elif name.startswith("self."):
        attribute = name[5:].partition(".")[0]
        facts.assigned.append((attribute, refs))
        if always and isinstance(target, ast.Attribute) and name.count(".") == 1:
            facts.always.add(attribute)
    elif refs:
        facts.local.setdefault(name.partition(".")[0], Refs()).update(refs)


def _read_statement(value: ast.expr, facts: FunctionFacts) -> None:
    """Read a call that stands alone: `super().__init__`, `append`, `add_module`, `setattr`."""
    if not isinstance(value, ast.Call):
        facts.assigned.append(("", refs_of(value)))
        return
    given = Refs()
    for argument in [*value.args, *(keyword.value for keyword in value.keywords)]:
        given.update(refs_of(argument))
    function = value.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
        caller = function.value.func
        if isinstance(caller, ast.Name) and caller.id == "super":
            facts.calls_super |= function.attr == "__init__"
            if given:
                facts.assigned.append(("*", given))
            return
    name = dotted_name(function) or ""
    owner, _, method = name.rpartition(".")
    first = value.args[0] if value.args else None
    literal = first.value if isinstance(first, ast.Constant) else "*"
    if method == "__init__":
        facts.initializes.append(owner)
    elif name == "setattr" and len(value.args) == 3:
        literal = value.args[1].value if isinstance(value.args[1], ast.Constant) else "*"
        target = dotted_name(value.args[0]) or ""
        if target.startswith("self."):
            facts.assigned.append((target[5:].partition(".")[0], refs_of(value.args[2])))
        elif target == "self":
            facts.assigned.append((str(literal), refs_of(value.args[2])))
        elif target:  # of a local, as `local.name = value`
            facts.local.setdefault(target.partition(".")[0], Refs()).update(refs_of(value.args[2]))
    elif method in _COLLECTING and owner == "self":
        facts.assigned.append((str(literal), given))
    elif method in _COLLECTING and owner.startswith("self."):
        facts.assigned.append((owner[5:].partition(".")[0], given))
    elif method in _COLLECTING:
        facts.local.setdefault(owner, Refs()).update(given)
    else:
        facts.assigned.append(("", refs_of(value)))
