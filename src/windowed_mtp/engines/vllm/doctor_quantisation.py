"""Whether vLLM would load each module of a head as the checkpoint stores it: quantised, or not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from windowed_mtp.checkpoint import Inventory
from windowed_mtp.engines.vllm.findings import Finding

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_EXPERTS = re.compile(r"(?P<module>(?:.*\.)?experts)\.(?P<rest>.+)")
_LINEAR = re.compile(r"(?P<module>.*\.(?:fc|\w*proj\w*))\.(?P<rest>\w+)")
_UNTOLD = "eh_proj"
"""The projection of some heads is quantised in vLLM and of others never, whatever their settings say."""
_SAME_NAME = re.compile(r"mtp\.|model\.layers\.\d+\.")
"""Modules that vLLM's heads call what the checkpoint calls them; other heads number or nest them anew."""
_WEIGHT = re.compile(r"(?:^|[._])q?weight(?:_packed)?$|proj(?:_blocks)?$")
_SCALE = re.compile(r"(?:^|[._])(?:qweight|qzeros|scales|weight_(?:packed|scale|zero_point)\w*)$")


@dataclass(frozen=True)
class Answer:
    """What vLLM would do with a module.

    Attributes
    ----------
    prefix : str
        Name under which vLLM looks the module up in the settings.
    quantised : bool or None
        Whether it expects quantised tensors; ``None`` if that cannot be told.
    refusal : str or None
        Why it would not load the module at all.
    """

    prefix: str
    quantised: bool | None
    refusal: str | None = None


def stored_modules(inventory: Inventory, head: Collection[str]) -> dict[str, bool]:
    """Tell for each projection of a head, and each set of experts, whether its tensors are quantised.

    Parameters
    ----------
    inventory : Inventory
        The checkpoint's.
    head : collection of str
        Names of the head's tensors.
    """
    dtypes = inventory.dtypes(head)
    modules: dict[str, bool] = {}
    for name in sorted(head):
        match = _EXPERTS.fullmatch(name) or _LINEAR.fullmatch(name)
        if match is None or match["module"].endswith(_UNTOLD):
            continue
        narrow = dtypes.get(name, "BF16") not in _FLOATS and _WEIGHT.search(match["rest"]) is not None
        scaled = _SCALE.search(match["rest"]) is not None
        modules[match["module"]] = modules.get(match["module"], False) or narrow or scaled
    return modules


def quantisation_findings(
    inventory: Inventory, head: Collection[str], ask: Callable[[str], Answer] | None, method: str | None
) -> Iterator[Finding]:
    """Compare how a head is stored with how vLLM would load it.

    Parameters
    ----------
    inventory : Inventory
        The checkpoint's.
    head : collection of str
        Names of the head's tensors.
    ask : callable or None
        Gives vLLM's answer for a module; ``None`` if vLLM cannot be asked.
    method : str or None
        Name of the quantisation method that vLLM found; ``None`` if it found none.
    """
    modules = stored_modules(inventory, head)
    if method is None and not any(modules.values()):
        return
    answers = {module: ask(module) for module in modules} if ask is not None else {}
    told = {module: answer for module, answer in answers.items() if answer.quantised is not None}
    refused = next((answer for answer in answers.values() if answer.refusal), None)
    wrong = next((module for module, answer in told.items() if answer.quantised != modules[module]), None)
    if refused is not None:
        yield Finding(
            check="quantisation", level="problem",
            cause=f"vLLM would not load the head's {refused.prefix}: {refused.refusal}",
            remedy="make the list of modules left out agree with the tensors",
        )  # fmt: skip
    elif wrong is not None:
        is_, loads = ("quantised", "as it is") if modules[wrong] else ("not quantised", "as quantised")
        by = f"with {method} and its list of modules left out" if method else "with no settings of quantisation"
        yield Finding(
            check="quantisation", level="warning",
            cause=f"the head's {wrong} is {is_}, but {by} vLLM would load {told[wrong].prefix} {loads}",
            remedy="make the settings agree with the tensors, in the words that this method matches; else the head is "
            "loaded wrongly, or not at all, and AL stays at 1",
        )  # fmt: skip
    elif told:
        yield Finding(check="quantisation", level="ok", cause=f"the head is quantised where vLLM's {method} expects it")
    elif modules:
        yield Finding(
            check="quantisation", level="warning",
            cause=f"it cannot be told which of the head's modules vLLM would load as quantised ({method})",
            remedy="watch AL after the start: a head that is loaded wrongly stays at 1",
        )  # fmt: skip


def asker(vllm_config: Any) -> Callable[[str], Answer] | None:
    """Make the function that asks vLLM's quantisation settings about a module of a built-in head.

    The settings are those that vLLM resolved for the engine, from whatever file they are in, with the names that its
    model classes give to modules.

    Parameters
    ----------
    vllm_config : VllmConfig
        With a speculative config.

    Returns
    -------
    callable or None
        Takes a module's name in the checkpoint; ``None`` where this vLLM cannot be asked.
    """
    if vllm_config.quant_config is None:
        return lambda module: Answer(module, quantised=False)
    try:
        from vllm.model_executor.model_loader.utils import get_model_architecture

        settings = copy.deepcopy(vllm_config.quant_config)
        target, _ = get_model_architecture(vllm_config.model_config)
        draft, _ = get_model_architecture(vllm_config.speculative_config.draft_model_config)
        for model_class in (target, draft):
            _configure(settings, model_class)
    except Exception:  # whatever importing a model's module or another vLLM's signatures raise
        return None
    mapper = getattr(draft, "hf_to_vllm_mapper", None)
    fused = {part: whole for whole, parts in settings.packed_modules_mapping.items() for part in parts}

    def ask(module: str) -> Answer:
        renamed = mapper.apply_list([module])[0] if mapper is not None else module
        if not _SAME_NAME.match(renamed):
            return Answer(renamed, None)
        parent, _, last = renamed.rpartition(".")
        prefix = f"{parent}.{fused.get(last, last)}"
        if last == "fc" and settings.get_name() == "modelopt_fp4":
            return Answer(prefix, quantised=False)  # vLLM's Qwen heads leave it out, whatever the settings say
        return _answer(vllm_config, settings, prefix)

    return ask


def _configure(settings: Any, model_class: Any) -> None:
    """Give the settings a model class's names, as vLLM does before it makes the model."""
    mapper = getattr(model_class, "hf_to_vllm_mapper", None)
    if mapper is not None:
        settings.apply_vllm_mapper(getattr(mapper, "get_rename_mapper", lambda: mapper)())
    packed = getattr(model_class, "packed_modules_mapping", None)
    settings.packed_modules_mapping = {**settings.packed_modules_mapping, **(packed or {})}


def _answer(vllm_config: Any, settings: Any, prefix: str) -> Answer:
    """Ask about one module, through layers of vLLM's own classes that were never initialised."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.linear import ReplicatedLinear

    kinds = [ReplicatedLinear]
    if prefix.rpartition(".")[2] == "experts":
        kinds = [getattr(fused_moe, "RoutedExperts", None) or fused_moe.FusedMoE, ReplicatedLinear]
    with set_current_vllm_config(vllm_config):
        for kind in kinds:
            try:
                with _bare_experts():
                    return Answer(prefix, _expects_quantised(settings.get_quant_method(_layer(kind), prefix)))
            except ValueError as error:
                if not _while_making_a_method(error):
                    return Answer(prefix, None, str(error).strip().partition("\n")[0].partition(". ")[0].rstrip("."))
                return Answer(prefix, quantised=True)
            except Exception as error:  # the stand-in lacks what this method looks at first
                if _while_making_a_method(error):
                    return Answer(prefix, quantised=True)
    return Answer(prefix, None)


def _layer(kind: Any) -> Any:
    from torch import nn

    layer = nn.Module.__new__(kind)
    nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace()
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    return layer


@contextmanager
def _bare_experts() -> Iterator[None]:
    """Let vLLM's class for experts that are not quantised be made without a kernel."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    made: Any = UnquantizedFusedMoEMethod
    kept = made.__init__
    made.__init__ = lambda self, *_, **__: None
    try:
        yield
    finally:
        made.__init__ = kept


def _expects_quantised(method: Any) -> bool:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if method is None or isinstance(method, (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)):
        return False
    return not getattr(method, "uses_meta_device", False)  # else vLLM quantises while it loads


def _while_making_a_method(error: Exception) -> bool:
    """Whether an error came out of a quantising method's constructor, so that the choice had been made."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), QuantizeMethodBase):
            return True
        trace = trace.tb_next
    return False
