"""transformers' text-generation pipeline on an exported model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import build, job, moved
from runs import ROOT
from transformers import AutoModelForCausalLM

import fla_harmonic.titan  # noqa: F401
from fla_harmonic.titan.export import export

PROMPTS = ["Mr. Darcy ", "a naïve façade — “señor” 𐍈", "\n\n  indented\t "]
GENERATE = """
import json, sys
import fla_harmonic
from transformers import pipeline
pipe = pipeline("text-generation", model=sys.argv[1])
assert type(pipe.model).__name__ == "HarmonicForCausalLM"
prompts, options = json.loads(sys.argv[2]), dict(max_new_tokens=12, do_sample=False)
alone = [pipe(prompt, return_tensors=True, **options)[0]["generated_token_ids"] for prompt in prompts]
texts = [pipe(prompt, **options)[0]["generated_text"] for prompt in prompts]
# transformers pads a batch only when told with what
pipe.tokenizer.pad_token_id = pipe.model.config.eos_token_id
batch = [row[0]["generated_text"] for row in pipe(prompts, batch_size=len(prompts), **options)]
print(json.dumps([alone, texts, batch]))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that export writes of an untrained `debug` model."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    # away from the start, where every logit is nearly zero
    dcp.save(moved(build(job())).state_dict(), checkpoint_id=folder / "step-1")
    export(job(), folder, folder / "hf")
    return folder / "hf"


@pytest.mark.processes
def test_pipeline_generates_from_bytes_in_a_new_process(exported: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", GENERATE, exported, json.dumps(PROMPTS)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    alone, texts, batch = json.loads(run.stdout.splitlines()[-1])
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    for prompt, ids, text, batched in zip(PROMPTS, alone, texts, batch, strict=True):
        expected = torch.tensor([list(prompt.encode())])
        for _ in range(12):
            following = model(expected, use_cache=False).logits[:, -1:].argmax(-1)
            if following.item() == model.config.eos_token_id:
                break
            expected = torch.cat([expected, following], 1)
        assert bytes(ids).rstrip(b"\0") == bytes(expected[0].tolist())
        assert text.startswith(prompt)
        assert batched == text
