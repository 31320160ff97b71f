"""Contracts: what the code around a replaced module expects of it (PL201-PL203, PL205).

Judged from the calls that the unpatched model really makes: the constructor calls of its skeleton,
and where a forward can be run on the meta device, the calls of `forward` and what came back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from patchlab.plan.evidence import ConstructorCall, Evidence, ForwardCall
from patchlab.plan.findings import Finding, Severity
from patchlab.plan.plan import Replacement
from patchlab.plan.wording import (
    constructor_parameters,
    forward_parameters,
    listed,
    named_parameters,
    needs_values,
    signature_of,
    takes_any_keyword,
)
from patchlab.render.numbers import count

# transformers 5.24 passes the cache to attention as `cache`, earlier versions as `past_key_values`.
# A forward that takes it in **kwargs and does not look computes right logits, and generates
# wrongly.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


def constructors(evidence: Evidence) -> Iterator[Finding]:
    """PL201: the real constructor call does not bind to the replacement's signature."""
    said: set[tuple[str, str]] = set()
    for replacement in evidence.plan:
        for call in evidence.constructor_calls:
            problem = _does_not_bind(replacement, call)
            at = (replacement.key, replacement.original.__name__)
            if call.original is not replacement.original or not problem or at in said:
                continue
            said.add(at)
            name = replacement.replacement.__name__
            takes = ", ".join(constructor_parameters(replacement.replacement))
            yield Finding(
                "PL201",
                "error",
                replacement.key,
                replacement.original.__name__,
                f"{replacement.original.__name__} is built with ({call.shown}); {name} takes "
                f"({takes}): {problem}. Give {name}.__init__ the same parameters.",
            )


def build_failure(evidence: Evidence) -> Iterator[Finding]:
    """PL201 or PL204: the patched skeleton could not be built, for a reason not told already."""
    failure = evidence.failure
    if failure is None:
        return
    told = any(True for _ in constructors(evidence))
    if told and failure.stage == "constructor":
        return
    key = next(
        (r.key for r in evidence.plan if r.replacement.__name__ == failure.subject),
        evidence.plan.replacements[0].key if len(evidence.plan) else "",
    )
    if failure.stage == "constructor":
        code, what = "PL201", f"the constructor of {failure.subject} failed"
        todo = "Mend the constructor."
    elif failure.stage == "init_weights":
        code = "PL204"
        what = f"initializing the weights of {failure.subject} failed"
        todo = (
            "The original's own initializer expects its parameters: keep their names, override "
            "_init_weights, do not subclass the original, or load with from_pretrained."
        )
    else:
        code, what = "PL204", f"the code that builds {failure.subject} failed"
        todo = "It reads something of the original that the replacement has not: add it."
    cannot = "be built" if evidence.after is None else "be built with from_config"
    if needs_values(failure.error):
        # Without a patch nothing fails like this: transformers' own models are built this way.
        cannot = "be built on the meta device, where from_pretrained builds it too"
        todo = "Compute there without reading the values of tensors."
    yield Finding(
        code,
        "error",
        key,
        failure.subject,
        f"the patched model cannot {cannot}: {what} in {failure.where}: {failure.error} {todo}",
    )


def forward_arguments(evidence: Evidence) -> Iterator[Finding]:
    """PL202: an argument of `forward` is lost, renamed, or swallowed by `**kwargs`."""
    for replacement in evidence.kept:
        original, new = replacement.original, replacement.replacement
        theirs, ours = forward_parameters(original), forward_parameters(new)
        if not theirs or not ours or new.forward is original.forward or _passes_on(ours):
            continue
        call = _call_at(evidence.calls_before, replacement)
        lost = [name for name in named_parameters(theirs) if name not in named_parameters(ours)]
        problem = _does_not_take(replacement, call) if call is not None else ""
        cache = [name for name in lost if name in CACHE_NAMES]
        swallowed = takes_any_keyword(new)
        renamed = [name for name in ours if name in CACHE_NAMES and name not in theirs]
        where = f"{new.__name__}.forward takes ({', '.join(ours)})"
        if problem:
            yield _argument_finding(
                replacement,
                "error",
                f"{original.__name__}.forward is called with {problem}; {where}.",
            )
        elif cache and swallowed:
            also = f", and takes {listed(renamed)}, which nobody passes" if renamed else ""
            yield _argument_finding(
                replacement,
                "error",
                f"{original.__name__}.forward takes its cache as {listed(cache)}; {new.__name__} "
                f"swallows that in **kwargs{also}. Logits are right and generation with a cache is "
                f"silently wrong. Name the parameter {cache[0]!r}.",
            )
        elif _matters(lost, call, swallowed, theirs, ours):
            does = "swallows them in **kwargs" if swallowed else "does not take them"
            yield _argument_finding(
                replacement,
                "warning",
                f"{original.__name__}.forward takes {listed(lost)}; {new.__name__} {does}. "
                f"{where}. Name them, or make sure nobody passes them.",
            )


def return_arity(evidence: Evidence) -> Iterator[Finding]:
    """PL203: `forward` returns another number of values, other shapes, or fails."""
    told = False
    replaced = evidence.plan.fqns
    for replacement in evidence.kept:
        before = _call_at(evidence.calls_before, replacement)
        after = _call_at(evidence.calls_after, replacement)
        if before is None or after is None:
            continue
        if before.returned == after.returned:
            # What is around may be replaced to go with it.
            if (
                replacement.fqns[0].rpartition(".")[0] not in replaced
                and not evidence.forward_failure
            ):
                yield from _other_shapes(replacement, before, after)
            continue
        told = True
        yield Finding(
            "PL203",
            "error",
            replacement.key,
            replacement.original.__name__,
            f"{replacement.original.__name__}.forward returns {before.returned}, "
            f"{replacement.replacement.__name__}.forward {after.returned}, in "
            f"{count(len(replacement.fqns), 'module')}. The code around it unpacks what the "
            f"original returns: at a batch of 2 a tensor passes for two values. Return the same.",
        )
    if evidence.forward_failure and not told and not _broken_already(evidence):
        replacement = evidence.plan.replacements[0]
        yield Finding(
            "PL203",
            "error",
            replacement.key,
            replacement.original.__name__,
            f"the patched model's forward fails where the unpatched one's runs: "
            f"{evidence.forward_failure}",
        )


def _other_shapes(
    replacement: Replacement, before: ForwardCall, after: ForwardCall
) -> Iterator[Finding]:
    for theirs, ours in zip(before.shapes, after.shapes, strict=True):
        if theirs is not None and ours is not None and theirs != ours:
            yield Finding(
                "PL203",
                "warning",
                replacement.key,
                replacement.original.__name__,
                f"where {replacement.original.__name__}.forward returns a tensor of shape "
                f"{theirs}, {replacement.replacement.__name__}.forward returns one of {ours}. It "
                f"may fit by broadcasting, and gives other numbers. Return the same shape.",
            )
            return


def never_called(evidence: Evidence) -> Iterator[Finding]:
    """PL205: a replaced module that the patched model builds and never calls."""
    if not evidence.calls_after or evidence.forward_failure:
        return
    for replacement in evidence.kept:
        idle = [
            fqn
            for fqn in replacement.fqns
            if fqn in evidence.calls_before and fqn not in evidence.calls_after
        ]
        if idle:
            yield Finding(
                "PL205",
                "warning",
                replacement.key,
                replacement.original.__name__,
                f"{replacement.replacement.__name__} is built at {listed(idle)} and its forward is "
                f"never called, where {replacement.original.__name__}'s was. Something around it "
                f"uses its parts instead.",
            )


def _passes_on(parameters: tuple[str, ...]) -> bool:
    """Tell whether a forward takes whatever comes, by position and by keyword, to hand it on."""
    stars = [name for name in parameters if name.startswith("*")]
    return len(stars) == 2 and not any(name in CACHE_NAMES for name in parameters)


def _does_not_bind(replacement: Replacement, call: ConstructorCall) -> str:
    signature = signature_of(replacement.replacement.__init__)
    if signature is None:
        return ""
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _does_not_take(replacement: Replacement, call: ForwardCall) -> str:
    """Return why a real call does not bind, "" if it does."""
    signature = signature_of(replacement.replacement.forward)
    if signature is None:
        return ""
    try:
        signature.bind(*range(call.num_positional), **dict.fromkeys(call.keywords))
    except TypeError as error:
        given = [f"{call.num_positional} by position"] if call.num_positional else []
        given += [f"{name}=…" for name in call.keywords]
        return f"{listed(given, 6)} ({error})"
    return ""


def _matters(
    lost: list[str],
    call: ForwardCall | None,
    swallowed: bool,
    theirs: tuple[str, ...],
    ours: tuple[str, ...],
) -> bool:
    """Tell whether lost names can be missed: passed by keyword, or not known not to be."""
    if not lost:
        return False
    if call is not None:
        return any(name in call.keywords for name in lost) and swallowed
    # Without a call to look at: a first parameter of another name is given by position nearly
    # always.
    return [*lost] != [theirs[0]] or len(theirs) != len(ours)


def _call_at(calls: Mapping[str, ForwardCall], replacement: Replacement) -> ForwardCall | None:
    return next((calls[fqn] for fqn in replacement.fqns if fqn in calls), None)


def _broken_already(evidence: Evidence) -> bool:
    """Tell whether another analysis has said why the forward fails."""
    return any(c.evidence == "built" for c in evidence.containers) or any(
        finding.severity == "error" for finding in forward_arguments(evidence)
    )


def _argument_finding(replacement: Replacement, severity: Severity, message: str) -> Finding:
    return Finding(
        "PL202",
        severity,
        replacement.key,
        replacement.original.__name__,
        message,
    )
