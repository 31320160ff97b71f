"""Every mixture-of-experts family of the installed transformers: recorded, replayed, clean after.

The choices of the model itself are taken from elsewhere than from patchlab: from what its experts
are handed, or for families that hand them nothing of the kind, from what their routers return.
"""

import contextlib
import math

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from patchlab.routing import RoutingTrace, find_routers, record_routing, replay_routing
from tests.routing.families import (
    families_in_source,
    output,
    present,
    tiny_model,
    tokens,
)
from tests.routing.family_settings import CLASSES, FAMILIES

PRESENT = [family for family in FAMILIES if present(family)]


def test_table_has_every_family_of_the_installed_transformers():
    """A family that transformers adds is tried here, or this fails."""
    covered = {CONFIG_MAPPING[family].__module__.split(".")[-2] for family in PRESENT}
    covered |= {place.split(".")[0] for place in CLASSES.values()}

    assert families_in_source() - covered == set()
    print(f"{len(PRESENT)} model types of {len(families_in_source())} families")


@contextlib.contextmanager
def own_choices(model):
    """Yield a dict that fills with what each router's experts were handed, by router."""
    routers = {site.fqn: site.module for site in find_routers(model)}
    seen, handles = {}, []

    def handed(router):
        def hook(module, args, kwargs):
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
                    seen[router] = value.clone()

        return hook

    def returned(router):
        def hook(module, args, out):
            seen[router] = READ[type(module).__name__](module, args, out)

        return hook

    for fqn, module in routers.items():
        if type(module).__name__ in READ:
            handles.append(module.register_forward_hook(returned(fqn)))
            continue
        block = model.get_submodule(fqn.rpartition(".")[0])
        holder = module if hasattr(module, "experts") else block
        handles.append(holder.experts.register_forward_pre_hook(handed(fqn), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _nonzero(values, count):
    return values.reshape(-1, values.shape[-1]).topk(count, dim=-1).indices


def _doge(module, args, out):
    x, y = out[1].topk(module.num_keys, dim=-1).indices
    sx, sy = out[1].topk(module.num_keys, dim=-1).values
    scores = (sx.unsqueeze(-1) + sy.unsqueeze(-2)).flatten(-2)
    pairs = (x.unsqueeze(-1) * module.num_keys + y.unsqueeze(-2)).flatten(-2)
    return pairs.gather(-1, scores.topk(module.top_k, dim=-1).indices)


# Routers whose experts are not handed the choice; each reads it off the router's own outputs.
READ = {
    "DogeCDMoE": _doge,
    "JetMoeTopKGating": lambda module, args, out: _nonzero(out[-1], module.top_k),
    "Llama4Router": lambda module, args, out: _nonzero(out[0], module.top_k),
    "NllbMoeTop2Router": lambda module, args, out: _nonzero(out[1], 2),
    "SwitchTransformersTop1Router": lambda module, args, out: _nonzero(out[0].float(), 1),
    # The skip expert is masked to expert 0 before the experts see it.
    "ZayaRouter": lambda module, args, out: _nonzero(
        out[0].softmax(-1) + module.balancing_biases, module.top_k
    ),
}


def _as_sets(index):
    return index.long().sort(dim=-1).values


def _perturb(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for site in find_routers(model):
            for parameter in site.module.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.add_(noise.to(parameter.dtype))


def _foreign(trace):
    """Another choice for every token, one that each router's groups allow."""
    generator = torch.Generator().manual_seed(11)
    tensors = []
    for router, index in zip(trace.routers, trace.to_list(), strict=True):
        span = router.num_experts // router.num_groups * router.top_k_groups
        order = torch.rand(len(index), span, generator=generator).argsort(dim=-1)
        tensors.append(order[:, : router.top_k] + router.num_experts - span)
    return tensors


def _gradients(model):
    grads = {}
    for site in find_routers(model):
        parts = [p.grad for p in site.module.parameters() if p.grad is not None]
        grads[site.fqn] = sum(float(part.abs().sum()) for part in parts)
    return grads


@pytest.mark.parametrize("family", PRESENT)
def test_family_is_recorded_and_replayed(family):
    """What is recorded is the model's own choice; what is imposed is kept, gradients alive."""
    model = tiny_model(family)
    inputs = tokens(model)
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        plain = output(model, inputs)
        with own_choices(model) as own, record_routing(model) as trace:
            recorded = output(model, inputs)
        # Without gradients the second time takes the short way, by the place in the output.
        with record_routing(model) as again:
            output(model, inputs)
        with replay_routing(model, trace):
            replayed = output(model, inputs)

    assert torch.equal(plain, recorded)
    assert float((plain - replayed).abs().max()) <= 1e-6
    ran = [fqn for fqn in trace.layers if bool((trace.indices[fqn] >= 0).all())]
    assert ran
    assert set(own) == set(ran)
    for fqn in ran:
        assert torch.equal(_as_sets(trace.indices[fqn]), _as_sets(own[fqn])), fqn
        assert torch.equal(trace.indices[fqn], again.indices[fqn]), fqn
    assert trace.agreement(again).ok

    _perturb(model)
    with torch.no_grad(), record_routing(model) as moved:
        output(model, inputs)
    assert not trace.agreement(moved).ok, "the perturbation must move some token, to prove anything"
    with replay_routing(model, trace), record_routing(model) as kept:
        out = output(model, inputs)
    out.float().pow(2).mean().backward()
    for fqn in ran:
        assert torch.equal(kept.indices[fqn], trace.indices[fqn]), fqn
    gradients = _gradients(model)
    for fqn in ran:
        assert math.isfinite(gradients[fqn])
        assert gradients[fqn] > 0, fqn

    foreign = RoutingTrace.from_list(model, _foreign(trace)) if ran == list(trace.layers) else None
    if foreign is not None:
        model.zero_grad()
        with replay_routing(model, foreign), record_routing(model) as imposed:
            out = output(model, inputs)
        out.float().pow(2).mean().backward()
        assert imposed.agreement(foreign).ok
        for fqn, gradient in _gradients(model).items():
            assert math.isfinite(gradient)
            assert gradient > 0, fqn

    with pytest.raises(ZeroDivisionError), record_routing(model), replay_routing(model, trace):
        output(model, inputs)
        raise ZeroDivisionError
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
