"""A day in one kernel, compressed: whatever a user does with patchlab, at random and again.

Scopes with random mappings, errors and interrupts, threads, cells with magics, swaps, previews,
widgets opened and closed, routing recorded and replayed. Every class is defined anew, as in a cell
that is run again, and every model and class is watched by a weak reference: what is still alive
when nobody holds it is a leak, whoever keeps it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from traitlets.config import Config
from transformers import AutoModel, LlamaConfig, LlamaModel, Qwen2MoeConfig, Qwen2MoeModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

import patchlab
from patchlab.errors import PatchlabError, PatchlabWarning

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 32,
}
LLAMA = LlamaConfig(**SIZES)
MOE = Qwen2MoeConfig(
    **SIZES,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
)
KEYS = ("LlamaMLP", "^Llama(MLP)$", ".*MLP$", "LlamaAttention", ".*Attention$", "Qwen2MoeMLP")
WRONG_KEYS = ("*MLP", "a.b.LlamaMLP", "", "(", "'LlamaMLP'", "Nowhere")
CELLS = (
    "%%patched LlamaMLP=Mine\nmodel = LlamaModel(LLAMA)",
    "%%patched ^Llama(MLP)$=Mine --diff\nmodel = LlamaModel(LLAMA)\nmodel",
    "%%patched LlamaMLP=Mine\nraise ValueError('in the cell')",
    "%%patched LlamaMLP=Nobody\nmodel = LlamaModel(LLAMA)",
    "%%patched --model model LlamaMLP=Mine\nmodel(torch.zeros(1, 2, dtype=int))",
    "%%patched --nonsense\n1",
    "%patches register LlamaMLP=Mine",
    "%patches",
    "%patches unregister LlamaMLP",
    "%patches status",
    "%patches clear",
    "class Mine(LlamaMLP):\n    pass",
)


class _Refused(Exception):
    """What the model's constructor raises when it is told to."""


@dataclass
class Soak:
    """One process and what was found in it.

    Attributes:
        counts: How often each thing was done.
        seconds: How long each scope took, in order.
        problems: What was not as it should be.
        alive: Weak references to models and classes that nobody should hold any more.
    """

    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    alive: list[weakref.ref[object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.routes: object = None

    # --- classes and models ----------------------------------------------------------------------

    def watch(self, made: object) -> object:
        """Watch an object from afar."""
        self.alive.append(weakref.ref(made))
        return made

    def replacement(self, base: type[nn.Module] = LlamaMLP) -> type[nn.Module]:
        """Define a class, as a cell does that is run again."""
        made = type("Mine", (base,), {"__module__": "__main__"})
        self.watch(made)
        return made

    def build(self, config: object = LLAMA) -> nn.Module:
        """Build a tiny model."""
        model = LlamaModel(config) if config is LLAMA else Qwen2MoeModel(config)
        self.watch(model)
        return model

    def mapping(self) -> dict[str, type[nn.Module]]:
        """Draw a mapping of one to three keys."""
        keys = self.random.sample(KEYS, self.random.randint(1, 3))
        bases = {"Attention": LlamaAttention, "Qwen2MoeMLP": Qwen2MoeMLP}
        return {
            key: self.replacement(next((b for n, b in bases.items() if n in key), LlamaMLP))
            for key in keys
        }

    # --- what a user does ------------------------------------------------------------------------

    def scope(self) -> None:
        """Build in a scope, with another one inside now and then."""
        with patchlab.patched(self.mapping(), on_finding="ignore") as report:
            self.build()
            if self.random.random() < 0.3:
                with patchlab.patched(self.mapping(), on_finding="ignore"):
                    self.build()
        if self.random.random() < 0.2:
            repr(report), report.to_html()

    def failing_scope(self) -> None:
        """Leave a scope by an error, an interrupt or a closed generator."""
        error = self.random.choice((_Refused, KeyboardInterrupt, GeneratorExit))
        with contextlib.suppress(error), patchlab.patched(self.mapping(), on_finding="ignore"):
            self.build()
            raise error

        def steps() -> Iterator[None]:
            with patchlab.patched(self.mapping(), on_finding="ignore"):
                self.build()
                yield

        running = steps()
        next(running)
        running.close()

    def failing_constructor(self) -> None:
        """Let a replacement's own constructor raise while a model is built."""

        def refuse(self: nn.Module, *args: object, **kwargs: object) -> None:
            raise _Refused

        mine = self.replacement()
        mine.__init__ = refuse  # type: ignore[method-assign]
        with contextlib.suppress(_Refused), patchlab.patched({"LlamaMLP": mine}):
            self.build()

    def wrong(self) -> None:
        """Ask for what cannot be."""
        mapping = {self.random.choice(WRONG_KEYS): self.replacement()}
        for use in (
            lambda: patchlab.patched(mapping, on_finding="error").__enter__(),
            lambda: patchlab.register_patch_mapping(mapping),
            lambda: patchlab.swap(self.build(), mapping),
            lambda: patchlab.preview(LLAMA, mapping).check(),
        ):
            with contextlib.suppress(PatchlabError), warnings.catch_warnings():
                warnings.simplefilter("ignore", PatchlabWarning)
                result = use()
                if hasattr(result, "undo"):
                    result.undo()
        patchlab.clear_patch_mapping()

    def registered(self) -> None:
        """Register, build through `from_config` and in `apply_patches`, and clear."""
        patchlab.register_patch_mapping(self.mapping())
        self.watch(AutoModel.from_config(LLAMA))
        with patchlab.apply_patches():
            self.build()
        patchlab.status().to_text()
        patchlab.clear_patch_mapping()

    def threads(self) -> None:
        """Let scopes of several threads overlap."""
        meeting = threading.Barrier(3)
        failed: list[BaseException] = []

        def work() -> None:
            try:
                mapping = {"LlamaMLP": self.replacement()}
                with patchlab.patched(mapping, on_finding="ignore"):
                    meeting.wait(60)
                    model = self.build()
                    meeting.wait(60)
                if not isinstance(model.layers[0].mlp, mapping["LlamaMLP"]):
                    raise AssertionError("another thread's class")
            except BaseException as error:  # noqa: BLE001 - reported below
                failed.append(error)

        running = [threading.Thread(target=work) for _ in range(3)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        self.problems += [f"thread: {error!r}" for error in failed]

    def swapped(self) -> None:
        """Swap in a model and back."""
        model = self.build()
        before = [id(module) for module in model.modules()]
        swap = patchlab.swap(model, {"LlamaMLP": self.replacement()})
        repr(swap)
        swap.undo()
        if [id(module) for module in model.modules()] != before:
            self.problems.append("a swap was not undone")

    def looked_at(self) -> None:
        """Preview, compare and show."""
        seen = patchlab.preview(self.random.choice((LLAMA, MOE)), self.mapping())
        seen.to_text(), seen.to_html()
        patchlab.diff_trees(self.build(), self.build()).to_html()

    def widgets(self) -> None:
        """Open a tree and close it."""
        from patchlab.notebook.tree_widget import TreeWidget

        tree = TreeWidget(self.build(), after=self.build())
        tree.to_html()
        tree.close()

    def panels(self) -> None:
        """Open a form and the whole laboratory, and close them."""
        from patchlab.notebook.forms import PatchForm
        from patchlab.notebook.lab import Lab

        form = PatchForm(namespace={"Mine": self.replacement()})
        form.key.value = self.random.choice((*KEYS, *WRONG_KEYS))
        form.close()
        Lab(self.build(), namespace={}).close()

    def cells(self) -> None:
        """Run cells with magics, right ones and wrong ones."""
        for cell in self.random.sample(CELLS, 3):
            self.shell.user_ns.setdefault("Mine", self.replacement())
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                self.shell.run_cell(cell)
        for name in ("Mine", "model", "_"):
            if (made := self.shell.user_ns.pop(name, None)) is not None and name != "_":
                with contextlib.suppress(TypeError):
                    self.watch(made)
        patchlab.clear_patch_mapping()

    def routing(self) -> None:
        """Record a mixture of experts, fail in the middle, replay."""
        model = self.build(MOE)
        ids = torch.randint(0, 16, (2, 4))
        with torch.no_grad(), patchlab.record_routing(model) as trace:
            model(ids)
            if self.random.random() < 0.3:
                handle = model.layers[1].register_forward_pre_hook(_interrupt)
                with contextlib.suppress(KeyboardInterrupt):
                    model(ids)
                handle.remove()
        other = self.build(MOE)
        with torch.no_grad(), patchlab.replay_routing(other, trace):
            other(ids)
        trace.to_text()

    def shown_routing(self) -> None:
        """Show a trace as a widget."""
        from patchlab.notebook.routing_widget import RoutingWidget

        model = self.build(MOE)
        with torch.no_grad(), patchlab.record_routing(model) as trace:
            model(torch.zeros(1, 3, dtype=torch.long))
        RoutingWidget(trace).close()

    # --- the day ---------------------------------------------------------------------------------

    def run(self, scopes: int, progress: Callable[[int], None] = lambda _: None) -> None:
        """Do things until this many scopes were entered."""
        often = {
            self.scope: 10,
            self.failing_scope: 4,
            self.failing_constructor: 1,
            self.wrong: 1,
            self.registered: 2,
            self.threads: 1,
            self.swapped: 1,
            self.looked_at: 0.5,
            self.widgets: 0.5,
            self.panels: 0.05,  # Some fifty widgets each.
            self.cells: 1,
            self.routing: 0.7,
            self.shown_routing: 0.3,
        }
        entered = 0
        while entered < scopes:
            (work,) = self.random.choices(list(often), list(often.values()))
            start = time.perf_counter()
            work()
            taken = time.perf_counter() - start
            self.counts[work.__name__] += 1
            if work == self.scope:
                self.seconds.append(taken)
            entered += {"scope": 1, "failing_scope": 2, "threads": 3}.get(work.__name__, 1)
            progress(entered)
        patchlab.clear_patch_mapping()

    def still_alive(self) -> list[object]:
        """Return the models and classes that are alive though nobody here holds them."""
        # The last error that was shown holds its frames, for a debugger.
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        # Twice: what finalizers of the first collection let go is collected by the second.
        gc.collect(), gc.collect()
        found = [made for made in (reference() for reference in self.alive) if made is not None]
        self.alive = [reference for reference in self.alive if reference() is not None]
        return found


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def open_soak(seed: int = 0) -> Iterator[Soak]:
    """Make the process one with a shell, and close it afterwards."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0  # Out[…] would hold what is shown.
    InteractiveShell.clear_instance()
    soak = Soak(seed)
    soak.shell = InteractiveShell.instance(config=config)  # type: ignore[attr-defined]
    soak.shell.user_ns.update(  # type: ignore[attr-defined]
        LlamaModel=LlamaModel, LlamaMLP=LlamaMLP, LLAMA=LLAMA, torch=torch
    )
    soak.shell.run_cell("%load_ext patchlab")  # type: ignore[attr-defined]
    try:
        yield soak
    finally:
        soak.shell.run_cell("%unload_ext patchlab")  # type: ignore[attr-defined]
        InteractiveShell.clear_instance()


def objects_by_type() -> Counter[str]:
    """Count what the garbage collector knows, by class."""
    gc.collect()
    return Counter(
        f"{type(made).__module__}.{type(made).__qualname__}" for made in gc.get_objects()
    )


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not say (Linux does)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    import resource

    return int(statm.read_text().split()[1]) * resource.getpagesize()
