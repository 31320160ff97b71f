"""A package that looks like transformers: few files, each way in which a class can be held."""

from __future__ import annotations

import textwrap
from pathlib import Path

FILES = {
    "__init__.py": '__version__ = "9.9"\n_import_structure = {"utils": ["ToyOutput"]}\n',
    "modeling_utils.py": """
        from torch import nn
        class PreTrainedModel(nn.Module):
            def __init__(self, config): super().__init__()
    """,
    "models/auto/modeling_auto.py": """
        MODEL_MAPPING_NAMES = OrderedDict([("toy", "ToyModel"), ("toy_vision", "ToyVision")])
        MODEL_MAPPING = _LazyAutoMapping(CONFIG_MAPPING_NAMES, MODEL_MAPPING_NAMES)
        class AutoModel(_BaseAutoModelClass):
            _model_mapping = MODEL_MAPPING
    """,
    "models/auto/auto_mappings.py": """
        CONFIG_MAPPING_NAMES = OrderedDict(
            [("toy", "ToyConfig"), ("toy_vision", "ToyVisionConfig")]
        )
    """,
    "models/toy/configuration_toy.py": """
        class ToyVisionConfig(PreTrainedConfig):
            model_type = "toy_vision"
        class ToyConfig(PreTrainedConfig):
            model_type = "toy"
            sub_configs_defaults = {
                "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="toy_vision")
            }
        __all__ = ["ToyConfig", "ToyVisionConfig"]
    """,
    "models/toy/modeling_toy.py": """
        from torch import nn
        from ...modeling_utils import PreTrainedModel
        from ..auto import AutoModel
        from .configuration_toy import ToyConfig
        class A(nn.Module):
            def forward(self, hidden_states, *, cache=None, **kwargs): ...
        class B(nn.Module): ...
        class C(nn.Module): ...
        class ToyOutput(dict): ...
        KINDS = {"a": A, "b": B}
        def build(config):
            made = nn.Sequential(B())
            return made
        class Direct(nn.Module):
            def __init__(self): self.x = A()
        class InBranches(nn.Module):
            def __init__(self, config):
                self.x = A() if config.a else B()
                if config.c:
                    self.y = C()
        class InAList(nn.Module):
            def __init__(self):
                layers = []
                for _ in range(3):
                    layers.append(A())
                self.layers = nn.ModuleList(layers)
        class Dispatched(nn.Module):
            def __init__(self, config): self.x = KINDS[config.kind](config)
        class Helped(nn.Module):
            def __init__(self, config): self.x = build(config)
        class ByMethod(nn.Module):
            def __init__(self, config):
                self.x = self._make(config)
                self.later()
            def _make(self, config): return A()
            def later(self): self.y = B()
        class ByClassAttribute(nn.Module):
            kind = A
            def __init__(self): self.x = self.kind()
        class Child(ByClassAttribute):
            kind = B
        class Override(Direct):
            def __init__(self):
                super().__init__()
                self.x = B()
        class Dropped(Direct):
            def __init__(self):
                super().__init__()
                del self.x
        class Keeper(nn.Module):
            def __init__(self, kept, other): self.kept = kept
        class Giver(nn.Module):
            def __init__(self): self.keeper = Keeper(A(), B())
        class Table(nn.ModuleDict):
            def __init__(self, config):
                for i in range(config.n): self[f"x{i}"] = A(config)
        class Maker(nn.Module):
            def __init__(self, kind): self.made = kind(4) if kind is not None else None
        class MakerGiver(nn.Module):
            def __init__(self, config):
                self.makers = nn.ModuleList(self.all_of_them(config))
            def all_of_them(self, config):
                return [Maker(kind=C if i else None) for i in range(config.n)]
        class Tester(nn.Module):
            def __init__(self, m): self.flag = isinstance(m, A)
        class Backbone(nn.Module):
            def __init__(self):
                self.inner = A()
                self.width = 4
        class Reader(nn.Module):
            def __init__(self):
                backbone = Backbone()
                self.width = backbone.width
                self.widths = [backbone.width[0], backbone.inner.width]
                self.depth = len(backbone.inner)
                self.half = backbone.inner // 2
                self.weight = nn.Parameter(torch.ones(backbone.inner))
                self.grid = torch.zeros(backbone.inner)
                self.keeper = Keeper(backbone.width, 1)
                names = [f"layers.{len(backbone.inner)}"]
                self.names = names
                for i in range(len(names)):
                    setattr(self.get_submodule(backbone.inner), "index", i)
        class PartTaker(nn.Module):
            def __init__(self):
                self.own = Backbone()
                self.part = self.own.inner
                other = Backbone()
                self.same = other.inner.to("cpu")
                self.whole = other.eval()
                setattr(self, "set", B())
        class ToyVision(PreTrainedModel):
            def __init__(self, config): self.x = C()
        class ToyModel(PreTrainedModel):
            config: ToyConfig
            def __init__(self, config):
                self.tower = AutoModel.from_config(config.vision_config)
        __all__ = ["ToyModel", "ToyOutput"]
    """,
}


def write_package(folder: Path) -> Path:
    """Write the package below a folder and return its root."""
    root = folder / "transformers"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root
