"""Text of a finished run: its prompt, its random tokens, dense and 2:4, and what is said where
2:4 products cannot run."""

import io
import math
import re
import sys

import pytest
import torch

from common_kernels import backend
from experiments import generate
from experiments.config.settings import ImplConfig
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from experiments.support.progress import say
from experiments.training import pretraining
from models import packed


def settings(**options):
    return generate.GenerationSettings(**{"run": "", "prompt": "", **options})


def config(run, prompt, dtype="fp32", **options):
    own = settings(run=str(run.directory), prompt=prompt, dtype=dtype, **options)
    return generate.GenerateConfig(own, ImplConfig(device="cpu", threads=1))


def test_the_text_is_the_most_likely_one_and_a_missing_device_is_named(
    trained, capsys, monkeypatch
):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    generate.run(config(trained, "the mask keeps", tokens=5))
    out, said = capsys.readouterr()
    model, encoding = trained.model().eval(), trained.tokenizer()
    ids = encoding.encode_ordinary("the mask keeps")
    with torch.no_grad():
        for _ in range(5):  # without a cache, by our own model
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    assert out == encoding.decode(ids) + "\n"
    assert said.startswith("dense products: no 2:4 products here: cuSPARSELt ")
    generate.run(config(trained, "", tokens=2, sparse=False))  # from the end-of-text token on
    assert capsys.readouterr().err == ""


@pytest.fixture
def packed_cpu(monkeypatch):
    """2:4 products on the CPU, emulated, of two tokens and more."""
    if torch.cuda.is_available():
        pytest.skip("products are emulated where there is no GPU")
    limits = packed.Limits(0, 2)
    monkeypatch.setattr(generate, "pack", lambda model, graphs: packed.pack(model, limits))


@pytest.fixture
def wide(tiny):
    """A finished run of a size that torch's 2:4 tensors take."""
    options = tiny("method=ste", "train.steps=12", "model.n_embd=64", "train.learning_rate=1e-2")
    pretraining.run(options, lambda message: None)
    return FinishedRun.open(options.directory())


def test_2_4_linears_run_packed(wide, packed_cpu, monkeypatch, capsys):
    kinds = []
    original = generate.Decoder

    def decoder(model, *rest):
        kinds.extend(type(module).__name__ for module in model.modules())
        return original(model, *rest)

    monkeypatch.setattr(generate, "Decoder", decoder)
    generate.run(config(wide, "the mask keeps", "bf16", tokens=5))
    out, said = capsys.readouterr()
    assert said == "2:4 products in 2 of 2 linears\n" and out.startswith("the mask keeps")
    assert kinds.count("PackedLinear") == 2


def test_no_more_tokens_than_the_model_takes_are_generated(trained, capsys):
    generate.run(config(trained, "two of four", tokens=32, sparse=False))
    out, said = capsys.readouterr()
    room = int(re.fullmatch(r"tokens=32 does not fit the model: it is (\d+) here\n", said)[1])
    assert len(trained.tokenizer().encode_ordinary("two of four")) == 32 - room
    generate.run(config(trained, "two of four", tokens=room, sparse=False))
    assert capsys.readouterr() == (out, "")
    with pytest.raises(UserError, match="leave no room for more in the 32 that the model takes"):
        generate.run(config(trained, "two of four " * 20))


def test_a_terminal_is_shown_control_characters_instead_of_obeying_them(capsys, monkeypatch):
    text = "a\x1b[31m\tb\r\n\u202e\x07é"
    generate.show([text])
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setattr(generate.sys.stdout, "isatty", lambda: True)
    shown = "a\\x1b[31m\tb\\r\n\\u202e\\x07é\n"
    generate.show(text)  # character by character
    say(text)
    assert capsys.readouterr().out == 2 * shown


# ------------------------------------------------------------------ random tokens

PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]  # in order of likelihood: 1, 3, 4, 0, 2


def drawn(rows=20_000, **options):
    """Frequencies of the tokens that are drawn, over many rows."""
    logits = torch.tensor([PROBABILITIES]).log().expand(rows, -1)
    generator = torch.Generator().manual_seed(0)
    tokens = generate.choose(logits, settings(**options), generator)
    assert tokens.shape == (rows,)
    return tokens.bincount(minlength=5) / rows


def test_frequencies_are_the_probabilities():
    for options, expected in [
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
        ({"temperature": 1e-300}, [0, 1, 0, 0, 0]),
        ({"temperature": 1}, PROBABILITIES),
        ({"temperature": 0.5}, [p**2 / 0.275 for p in PROBABILITIES]),
        ({"temperature": 1, "top_k": 1}, [0, 1, 0, 0, 0]),
        ({"temperature": 1, "top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 1, "top_k": 9}, PROBABILITIES),
    ]:
        found, expected = drawn(**options), torch.tensor(expected)
        assert torch.equal(found > 0, expected > 0)
        # Five standard deviations of a frequency out of 20,000.
        assert (found - expected).abs().max() <= 5 * math.sqrt(0.25 / 20_000)


def test_a_setting_out_of_range_is_named():
    for options, message in [
        ({"temperature": -1.0}, "temperature=-1.0; it must lie in"),
        ({"temperature": math.nan}, "temperature=nan; it must lie in"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0; it must lie in"),
        ({"top_k": 5}, "temperature=0 takes the most likely token; add temperature=1"),
        ({"seed": -1}, "seed=-1; it must lie in"),
        ({"tokens": 0}, "tokens=0; it must lie in"),
    ]:
        with pytest.raises(ValueError, match=message):
            settings(**options)


# ------------------------------------------------------------------ text


class Bytes:
    """A tokenizer whose tokens are bytes; 256 ends the text."""

    eot_token = 256

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


def test_pieces_end_with_whole_characters_and_the_text_with_its_token():
    prompt, tokens = [*b"a="], iter([*"é€!".encode(), 256, *b"never"])
    pieces = list(generate.text_of(Bytes(), prompt, tokens))
    assert pieces == ["a=", "é", "€", "!", ""]
    assert next(tokens) == ord("n")  # nothing was made after the end
    cut = list(generate.text_of(Bytes(), [], "a€".encode()[:-1]))
    assert cut == ["", "a", "\N{REPLACEMENT CHARACTER}"]


# ------------------------------------------------------------------ prompts

PROMPTS = ["Hello, my name is", "def f(x):", "a=1", "one\n  two\n", "${oc.env:HOME} [x] {y: 'z'}",
           '\\"quoted\\"', "", " padded ", "--help"]  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """asked(*arguments) -> the prompt that the driver understands."""

    def ask(*arguments, typed=None):
        found = []
        stdin = io.TextIOWrapper(io.BytesIO(typed or b""))
        stdin.isatty = lambda: typed is None
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "argv", ["generate", "run=RUN", *arguments])
        monkeypatch.setattr(generate, "run", lambda config: found.append(config.settings))
        generate.main()
        return found[0].prompt

    return ask


def test_a_prompt_is_taken_as_it_is_typed(asked):
    for prompt in PROMPTS:
        assert asked(f"prompt={prompt}", "tokens=3") == prompt


def test_a_prompt_comes_in_other_ways_as_well(asked):
    prompt = PROMPTS[4]
    typed = f"{prompt}\r\n".encode()
    assert asked("tokens=3", f"--prompt={prompt}") == prompt
    assert asked("--prompt", prompt) == prompt
    assert asked("prompt=-", typed=typed) == prompt
    assert asked(typed=typed) == prompt


def test_a_wrong_prompt_is_one_line(asked):
    for arguments, message in [
        ([], 'error: prompt="..." is missing'),
        (["--prompt"], "error: argument --prompt: expected one argument; see --help"),
        (["prompt=a", "prompt=b"], "error: prompt is given twice"),
        (["prompt=a\udce9"], "error: prompt is not UTF-8 (character 2)"),
        (["prompt=a", "temperature=warm"], "error: the config.temperature"),
        (["prompt=a", "top_k=-3", "temperature=1"], "error: top_k=-3; it must lie in"),
    ]:
        with pytest.raises(SystemExit) as stop:
            asked(*arguments)
        assert stop.value.code.startswith(message) and "\n" not in stop.value.code


def test_input_that_is_not_utf8_is_named_with_its_byte(asked):
    with pytest.raises(SystemExit, match="standard input is not UTF-8: byte 2 is 0xe9"):
        asked("prompt=-", typed=b"ab\xe9")
