"""
The torchtitan train specs `harmonic`, `mamba`, `llama` and `hallamonic`: importing this module registers them.

    [experimental]
    custom_import = "fla_harmonic.titan"

    [job]
    custom_config_module = "fla_harmonic.titan.config"
"""

from fla_harmonic.titan import patches

# before an import below meets another torchtitan, or copies the device of this one
patches.apply()

# ruff: noqa: E402
from functools import partial

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.protocols.train_spec import TrainSpec, _extra_train_specs, register_train_spec

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
from fla_harmonic.titan.models.hallamonic import HALLAMONIC, Hallamonic
from fla_harmonic.titan.models.hf_model import HFModel, HFStateDictAdapter
from fla_harmonic.titan.models.llama import Llama, LlamaStateDictAdapter
from fla_harmonic.titan.patches.cpu import install_cpu_shim

_spec = partial(
    TrainSpec,
    pipelining_fn=pipeline,
    build_optimizers_fn=build_optimizers,
    build_lr_schedulers_fn=build_lr_schedulers,
    build_tokenizer_fn=build_tokenizer,
    build_dataloader_fn=build_dataloader,
    build_loss_fn=replicas_summed(build_loss),
    build_validator_fn=SplitValidator,
    build_metrics_processor_fn=JSONLMetricsProcessor,
)
_hf_spec = partial(_spec, parallelize_fn=parallelize, state_dict_adapter=HFStateDictAdapter)
_SPECS = {
    "harmonic": _hf_spec(HFModel, HARMONIC),
    "mamba": _hf_spec(HFModel, MAMBA),
    "llama": _spec(Llama, LLAMA, parallelize_llama_anywhere, state_dict_adapter=LlamaStateDictAdapter),
    "hallamonic": _hf_spec(Hallamonic, HALLAMONIC),
}


def register_specs() -> None:
    """Register the four specs with torchtitan, once; a RuntimeError where another package has registered one of the names."""
    for name, spec in _SPECS.items():
        known = _extra_train_specs.get(name)
        if known is None:
            register_train_spec(name, spec)
        elif known.model_args is not spec.model_args:
            raise RuntimeError(
                f"expected the train spec {name!r} to be free or ours; found that of {known.model_cls.__module__}. "
                "Remedy: do not import both in one job"
            )


register_specs()

__all__ = ["install_cpu_shim", "register_specs"]
