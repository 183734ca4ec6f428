"""The public Python API: what `import gnomon` offers, over an ordinary model directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import gnomon
import tiny_models
from gnomon.config import EngineConfig
from gnomon.engine.budget import OverBudget
from gnomon.models.fit import measure_needs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


def test_loading_and_generating_as_mlx_lm_does(directory: Path) -> None:
    with gnomon.load(directory) as engine:
        assert (engine.model.id, engine.model.model_type) == ("tiny-llama", "llama")
        prompt = engine.tokenizer.encode("the cat sat on the mat")
        theirs = [int(token) for token, _ in generate_step(mx.array(prompt), load_model(directory)[0], max_tokens=20)]
        done = engine.generate("the cat sat on the mat", max_tokens=20, ignore_eos=True)
        assert done.choices[0].ids == theirs
        assert done.text == engine.tokenizer.decode(theirs)
        assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 20)
        assert done.usage.prompt_tokens == len(prompt)
        assert done.usage.lane == "serial"


def test_a_text_prompt_gets_one_beginning_of_sequence_token(tmp_path: Path) -> None:
    directory = tiny_models.save("llama", tmp_path)
    file = directory / "tokenizer_config.json"
    begin = tiny_models.SPECIALS[1]
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": begin}))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    with gnomon.load(directory) as engine:
        plain = engine.generate("the cat", max_tokens=1).usage.prompt_tokens
        assert plain == len(engine.tokenizer.encode("the cat")) + 1
        assert engine.generate(begin + "the cat", max_tokens=1).usage.prompt_tokens == plain


def test_a_stop_string_ends_a_choice_and_is_not_shown(directory: Path) -> None:
    with gnomon.load(directory) as engine:
        text = engine.generate("the cat", max_tokens=20, ignore_eos=True).text
        stop = text[5:8]
        done = engine.generate("the cat", max_tokens=20, ignore_eos=True, stop=[stop])
        assert done.text == text[: text.index(stop)]
        assert (done.choices[0].finish_reason, done.choices[0].stop) == ("stop", stop)


def test_a_failing_request_raises(directory: Path) -> None:
    with gnomon.load(directory) as engine, pytest.raises(gnomon.InvalidRequest, match="empty"):
        engine.generate([])


def test_a_directory_without_a_model_raises_what_loading_says(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        gnomon.load(tmp_path)
    with pytest.raises(ValueError, match=r"there is no model directory .*nowhere"):
        gnomon.load(tmp_path / "nowhere")


def test_a_memory_budget_shortens_serialises_and_refuses_before_work(directory: Path) -> None:
    needs = measure_needs(directory)
    budget = int(needs.total(200))
    with gnomon.load(directory, EngineConfig(memory_budget=budget)) as engine:
        admission = engine.stats()["admission"]
        assert (admission["enforced_context_tokens"], admission["memory_budget_bytes"]) == (200, budget)
        assert len(engine.generate([5] * 150, ignore_eos=True).choices[0].ids) == 50
        with pytest.raises(gnomon.InvalidRequest, match="200 tokens") as caught:
            engine.generate([5] * 200)
        assert caught.value.code == "memory_budget_exceeded"
        # Two choices have less room each than one has, and two requests at a time none at all.
        with pytest.raises(gnomon.InvalidRequest, match="2 choices"):
            engine.generate([5] * 199, n=2)
        streams = [engine.stream(gnomon.Request(str(i), (5,) * 150, max_tokens=50, ignore_eos=True)) for i in range(3)]
        ends = [list(stream)[-1] for stream in streams]
        assert all(isinstance(end, gnomon.Finished) and end.usage.lane == "serial" for end in ends)
        assert engine.stats()["steps"]["batched"] == 0
    with pytest.raises(OverBudget, match=str(needs.weights)):
        gnomon.load(directory, EngineConfig(memory_budget=needs.weights))


def test_importing_gnomon_loads_neither_mlx_nor_a_web_library() -> None:
    code = (
        "import sys, gnomon\n"
        "gnomon.SamplingParams(), gnomon.QueueFull, dir(gnomon)\n"
        "sys.exit(any(name in sys.modules for name in ('mlx.core', 'mlx_lm', 'fastapi', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(gnomon, name) is not None for name in gnomon.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = gnomon.nothing


def test_a_program_that_forgets_to_stop_still_ends(directory: Path) -> None:
    code = (
        f"import gnomon; engine = gnomon.load({str(directory)!r})\n"
        "stream = engine.stream(gnomon.Request('a', (5, 6, 7), max_tokens=2000, ignore_eos=True))\n"
        "print(type(next(stream)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "Progress\n"), done.stderr
