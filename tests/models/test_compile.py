"""torch.compile of a Harmonic model."""

import os
import shutil

import pytest
import torch
from small_models import model, tokens


@pytest.mark.parametrize(("preset", "backend"), [
    # graphs of the forward and backward pass without generated code, which takes minutes
    ("paper", "aot_eager"), ("stack", "aot_eager"),
    pytest.param("paper", "inductor", marks=[
        pytest.mark.slow, pytest.mark.processes,
        pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler: g++")]),
])
def test_training_step_is_one_graph_with_the_gradients_of_eager(preset: str, backend: str) -> None:
    lm = model(preset).train()
    compiled = torch.compile(lm, fullgraph=True, backend=backend)
    # at the second length torch compiles for lengths that may change
    for length in (40, 33):
        x = tokens(2, length)
        results = []
        for run in (lm, compiled):
            lm.zero_grad()
            output = run(input_ids=x, labels=x, use_cache=False)
            output.loss.backward()
            results.append([output.logits.detach(), output.loss.detach(), *(p.grad.clone() for p in lm.parameters())])
        for actual, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
