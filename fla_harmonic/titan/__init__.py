"""
The torchtitan train specs `harmonic`, `mamba`, `llama` and `hallamonic`: importing this module registers them.

    [experimental]
    custom_import = "fla_harmonic.titan"

    [job]
    custom_config_module = "fla_harmonic.titan.config"
"""

from collections.abc import Mapping

from fla_harmonic.titan.patches.cpu import check_torchtitan_version, install_cpu_shim

# before an import below meets another torchtitan, or takes over the device of this one
check_torchtitan_version()
install_cpu_shim()

# ruff: noqa: E402
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.protocols import BaseModelArgs, ModelProtocol, StateDictAdapter, train_spec
from torchtitan.protocols.train_spec import ParallelizeFunction, TrainSpec

from fla_harmonic.titan.components.dataloader import build_dataloader
from fla_harmonic.titan.components.loss import build_loss
from fla_harmonic.titan.components.metrics import JSONLMetricsProcessor
from fla_harmonic.titan.components.optimizer import build_optimizers
from fla_harmonic.titan.components.tokenizer import build_tokenizer
from fla_harmonic.titan.components.validate import SplitValidator
from fla_harmonic.titan.distributed.gradient_scale import replicas_summed
from fla_harmonic.titan.distributed.parallelize import parallelize, parallelize_llama_anywhere
from fla_harmonic.titan.distributed.pipeline import pipeline
from fla_harmonic.titan.models.flavors import HARMONIC, LLAMA, MAMBA
from fla_harmonic.titan.models.flops import use_honest_peak_flops
from fla_harmonic.titan.models.hallamonic import HALLAMONIC, Hallamonic, read_directory
from fla_harmonic.titan.models.hf_model import HFModel, HFStateDictAdapter
from fla_harmonic.titan.models.llama import Llama, LlamaStateDictAdapter
from fla_harmonic.titan.patches.checkpoint import install_checkpoint_hooks

_FAMILIES: dict[str, tuple[type[ModelProtocol], Mapping[str, BaseModelArgs], ParallelizeFunction, type[StateDictAdapter]]] = {
    "harmonic": (HFModel, HARMONIC, parallelize, HFStateDictAdapter),
    "mamba": (HFModel, MAMBA, parallelize, HFStateDictAdapter),
    "llama": (Llama, LLAMA, parallelize_llama_anywhere, LlamaStateDictAdapter),
    "hallamonic": (Hallamonic, HALLAMONIC, parallelize, HFStateDictAdapter),
}


def register_specs() -> None:
    """
    Register the four specs with torchtitan, once.

    Raises:
        RuntimeError: another package has registered one of the names.
    """
    for name, (model_cls, flavors, parallelize_fn, adapter) in _FAMILIES.items():
        if (known := train_spec._extra_train_specs.get(name)) is not None:
            if known.model_args is not flavors:
                raise RuntimeError(
                    f"expected the train spec {name!r} to be free or ours; found that of {known.model_cls.__module__}. "
                    "Remedy: do not import both in one job"
                )
            continue
        train_spec.register_train_spec(name, TrainSpec(
            model_cls=model_cls,
            model_args=flavors,
            parallelize_fn=parallelize_fn,
            pipelining_fn=pipeline,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=read_directory(build_dataloader) if name == "hallamonic" else build_dataloader,
            build_tokenizer_fn=build_tokenizer,
            build_loss_fn=replicas_summed(build_loss),
            build_validator_fn=SplitValidator,
            build_metrics_processor_fn=JSONLMetricsProcessor,
            state_dict_adapter=adapter,
        ))


use_honest_peak_flops()
install_checkpoint_hooks()
register_specs()

__all__ = ["install_cpu_shim", "register_specs"]
