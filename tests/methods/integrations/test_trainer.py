"""Methods inside transformers.Trainer: the same training as in a plain loop, and exact resume."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import methods
from methods.integrations.trainer import STATE, MethodCallback

STEPS, MICRO, ACCUMULATION, TOKENS = 6, 4, 2, 16
TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": TOKENS,
}
# Phases change after three of the six steps; masks that are kept are chosen every second step.
VARIANTS = {
    "s_ste": {},
    "fst": {"alpha": 1e-2, "refresh_every": 2, "dense_fraction": 0.5},
    "slope": {"adapter_rank": 4, "adapter_fraction": 0.5},
    # Its update rule is an optimizer of its own.
    "ast": {"kl_weight": 0.0, "task_weight": 1.0, "refresh_every": 2, "alpha": 1e-2},
    # Its loss, too; the teacher is a copy of the dense model.
    "ast distilling": {"layer_weight": 0.5, "refresh_every": 2, "alpha": 1e-2, "slorb_k": 8},
}
every_variant = pytest.mark.parametrize("name", VARIANTS)


class Ordered(Trainer):
    """Batches in the order of the data, so that a plain loop can take the same."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


class Recorder(TrainerCallback):
    """Gradients as the optimizer takes them and the state after each step; called last."""

    def __init__(self, model, method, optimizer):
        self.parts = model, method, optimizer
        self.gradients, self.states = [], []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.gradients.append(gradients_of(self.parts[0]))

    def on_step_end(self, *args, **kwargs):
        self.states.append(copy.deepcopy([part.state_dict() for part in self.parts]))


def gradients_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def sequences():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (STEPS * MICRO * ACCUMULATION, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, 0] = -100  # never predicted, but transformers 4.57 to 5.6 divide by their number, too
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def build(name, layers=2, **options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **TINY))
    variant = {**VARIANTS.get(name, {}), "include": ["*mlp*"], "total_steps": STEPS, **options}
    return model, methods.build(name.split()[0], measure_every=1, **variant)


def optimizer_of(method, model):
    return method.optimizer(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def arguments_for(directory, **settings):
    settings = {"max_steps": STEPS, "per_device_train_batch_size": MICRO, **settings}
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, **settings}
    return TrainingArguments(output_dir=str(directory), logging_steps=1, **settings)


def trained(model, method, directory, resume=None, of=Ordered, **settings):
    """A finished training with the optimizer that the callback makes."""
    arguments = arguments_for(directory, resume_from_checkpoint=resume, **settings)
    callback = MethodCallback(method, model, arguments)
    data = sequences()
    trainer = of(
        model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[callback],
        optimizers=callback.optimizers,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def trainer_for(name, directory, resume_from=None, **settings):
    """A trainer of a variant, with a recorder and an optimizer of the test's own."""
    model, method = build(name)
    options = {
        "gradient_accumulation_steps": ACCUMULATION,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "resume_from_checkpoint": resume_from,
        **settings,
    }
    arguments = arguments_for(directory, **options)
    callback = MethodCallback(method, model, arguments)
    optimizer = optimizer_of(method, model)
    callbacks = [callback, Recorder(model, method, optimizer)]
    trainer = Ordered(
        model, arguments, train_dataset=sequences(), callbacks=callbacks,
        optimizers=(optimizer, None),
    )  # fmt: skip
    return trainer, method


def records(trainer):
    """The training logs without what a clock or the reader's own steps decide."""
    kept = ["step", "loss", "grad_norm", "flip_rate", "density", "illegal_groups", "phase"]
    logs = (log for log in trainer.state.log_history if "loss" in log)
    return [{k: log.get(k) for k in [*kept, "loss_is"]} for log in logs]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A finished training per variant, with a checkpoint after every step; made when asked for."""
    done = {}

    def get(name):
        if name not in done:
            directory = tmp_path_factory.mktemp(name)
            trainer, method = trainer_for(name, directory)
            trainer.train()
            done[name] = SimpleNamespace(trainer=trainer, method=method, directory=directory)
        return done[name]

    return get


@every_variant
def test_it_is_the_training_of_a_plain_loop(name, uninterrupted):
    """Order of the calls, clipping before the decay, random bits per micro-batch.

    Every step from the state in which the Trainer begins it.
    """
    model, method = build(name)
    method.convert(model)
    optimizer = optimizer_of(method, model)
    batches = iter(torch.stack([d["input_ids"] for d in sequences()]).split(MICRO))
    trainer = uninterrupted(name).trainer
    logs = records(trainer)
    recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder))
    for step in range(STEPS):
        if step:
            parts = (model, method, optimizer)
            for part, state in zip(parts, recorder.states[step - 1], strict=True):
                part.load_state_dict(state)
        method.on_step_begin(step)
        total = 0.0
        for _ in range(ACCUMULATION):
            batch = next(batches)
            loss = method.loss(model, {"input_ids": batch, "labels": batch}) / ACCUMULATION
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        method.on_gradients(step, optimizer)
        # The Trainer divides sums by the tokens of all micro-batches: 2e-5; transformers 4 rounds
        # what it logs to four places: 5e-5.
        assert logs[step]["loss"] == pytest.approx(total, abs=7e-5)
        for key, gradient in gradients_of(model).items():
            layer = method.layers.get(key.removesuffix(".weight"))
            # A last bit of dY draws another sample in few groups.
            bound = 2**-3 if getattr(layer, "mvue", None) else 2**-12
            error = (recorder.gradients[step][key] - gradient).norm()
            assert error <= bound * gradient.norm() + 1e-7, key
        optimizer.step()
        optimizer.zero_grad()
        method.on_step_end(step)
        assert logs[step]["phase"] == method.phase()
        said = "0.33 task + 0.67 kl + 0.5 layer" if name == "ast distilling" else None
        assert logs[step]["loss_is"] == said


@every_variant
def test_resume_equals_an_uninterrupted_training(name, uninterrupted, tmp_path):
    """Before the change of phase, which the run itself makes; in another folder."""
    whole = uninterrupted(name)
    folder = str(whole.directory / "checkpoint-3")
    trainer, method = trainer_for(name, tmp_path, resume_from=folder)
    trainer.train(resume_from_checkpoint=folder)
    assert records(trainer) == records(whole.trainer)
    expected = whole.trainer.model.state_dict()
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert method.metrics() == whole.method.metrics()


def test_a_checkpoint_of_another_method_does_not_fit(uninterrupted, tmp_path):
    """Not even one that has the same buffers."""
    folder = str(uninterrupted("fst").directory / "checkpoint-4")
    other, _ = trainer_for("semi_sparse", tmp_path, resume_from=folder)
    told = r"^this state was saved by methods\.fst and cannot continue with methods\.semi_sparse:"
    with pytest.raises(ValueError, match=told):
        other.train(resume_from_checkpoint=folder)


@every_variant
def test_save_pretrained_before_finalize_writes_the_plain_model(name, tmp_path):
    """Without the Trainer, and of the weights that are given, as those of an average."""
    model, method = build(name)
    method.convert(model)
    for adapter in (getattr(layer, "right", None) for layer in method.layers.values()):
        if adapter is not None:
            nn.init.normal_(adapter)
    methods.refresh(model)
    ids = sequences()[0]["input_ids"][None]
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.9)
    methods.refresh(average)
    for own in (model, average):
        if own is average:
            model.save_pretrained(tmp_path / "plain", state_dict=average.state_dict())
        else:
            with torch.no_grad():
                own.model.embed_tokens.weight.mul_(2.0)
            own.save_pretrained(tmp_path / "plain")
        loaded, found = LlamaForCausalLM.from_pretrained(
            tmp_path / "plain", output_loading_info=True
        )
        assert not any(found[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            expected = own.eval()(ids).logits
            torch.testing.assert_close(loaded.eval()(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_distillation_is_that_of_training_alone(tmp_path):
    """Evaluation, a copy of the model and a model without labels have the model's own loss."""
    model, method = build("ast distilling")
    MethodCallback(method, model, arguments_for(tmp_path))
    rows = torch.stack([row["input_ids"] for row in sequences()[:4]])
    batch = {"input_ids": rows, "labels": rows}
    twin = copy.deepcopy(model)
    own = LlamaForCausalLM.forward(model.train(), **batch).loss
    method.open_micro_batch()
    assert not torch.equal(model(**batch).loss, own)
    assert torch.equal(twin.train()(**batch).loss, own)
    assert torch.equal(model.eval()(**batch).loss, own)
    assert model(input_ids=rows).loss is None
    method.finalize(model)
    assert torch.equal(model.train()(**batch).loss, LlamaForCausalLM.forward(model, **batch).loss)


def test_the_best_model_comes_back_with_what_is_under_its_masks(tmp_path):
    class Falling(Ordered):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": abs(self.state.global_step - 4.0)}
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, self.control, metrics
            )
            return metrics

    model, method = build("fst")
    trained(
        model, method, tmp_path, of=Falling, save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    best = torch.load(tmp_path / "checkpoint-4" / STATE, weights_only=True)
    assert method.state_dict()["dense"] == best["dense"]
    for name, layer in method.sparse_layers.items():
        for key, value in layer.state_dict().items():
            assert torch.equal(value, best["layers"][name][key]), (name, key)


def test_a_conv1d_is_trained_saved_and_resumed(hf_model, tmp_path):
    """Its weight is [in, out] in every file and [out, in] in the products."""
    models = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        method = methods.build("s_ste", include="all", total_steps=STEPS)
        models.append(hf_model("gpt2", vocab_size=32).train())
        settings = {"save_steps": 3, "weight_decay": 0.1, "adam_beta2": 0.95}
        trainer = trained(models[-1], method, tmp_path, resume, **settings)
    decayed, others = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert tuple(decayed["betas"]) == tuple(others["betas"]) == (0.9, 0.95)
    whole, again = models
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
    ids = sequences()[0]["input_ids"][None]
    whole.save_pretrained(tmp_path / "end")
    loaded = type(whole).from_pretrained(tmp_path / "end").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, whole.eval()(ids).logits)


def test_a_model_that_is_converted_already(tmp_path):
    arguments = arguments_for(tmp_path)
    model, method = build("s_ste")
    report = method.convert(model)
    assert MethodCallback(method, model, arguments).report is report
    with pytest.raises(ValueError, match="has converted another model"):
        MethodCallback(method, build("s_ste")[0], arguments)


def test_the_trainer_says_the_number_of_steps(tmp_path):
    model, method = build("fst", total_steps=0)
    with pytest.raises(ValueError, match="set max_steps, or the method's total_steps"):
        MethodCallback(method, model, arguments_for(tmp_path, max_steps=-1))
    MethodCallback(method, model, arguments_for(tmp_path))
    said = [method, *method.sparse_layers.values()]
    assert {each.config.total_steps for each in said} == {STEPS}


def test_what_would_go_wrong_silently_is_refused(uninterrupted, tmp_path):
    arguments = arguments_for(tmp_path)
    model, method = build("s_ste")
    method.convert(model)
    with pytest.raises(RuntimeError, match=r"masks and operands did not follow: .*MethodCallback"):
        Trainer(model, arguments, train_dataset=sequences()).train()

    model, method = build("ast")
    callbacks = [MethodCallback(method, model, arguments)]
    with pytest.raises(ValueError, match=r"ast\.AdamW, not .* optimizers=callback\.optimizers\)$"):
        Trainer(model, arguments, train_dataset=sequences(), callbacks=callbacks).train()

    folder = tmp_path / "checkpoint-3"
    shutil.copytree(uninterrupted("s_ste").directory / "checkpoint-3", folder)
    (folder / STATE).unlink()
    again, _ = trainer_for("s_ste", tmp_path)
    with pytest.raises(ValueError, match=rf"checkpoint-3/{STATE} is missing"):
        again.train(resume_from_checkpoint=str(folder))

    trainer, _ = trainer_for("ast distilling", tmp_path / "own", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="used another loss than the model's"):
        trainer.train()


def test_settings_that_need_another_machine_are_refused():
    """Stand-ins for arguments that transformers accepts only on a GPU or under torchrun."""
    model, method = build("s_ste")
    callback = MethodCallback(method, model, SimpleNamespace(device="cpu", max_steps=-1))
    allowed = {"fsdp": "", "deepspeed": None, "world_size": 1, "ddp_broadcast_buffers": None,
               "fp16": False, "max_grad_norm": 1.0}  # fmt: skip
    state = SimpleNamespace(global_step=0, max_steps=STEPS)
    for settings, message in (
        ({"deepspeed": "stage2.json"}, "weights sharded by deepspeed"),
        ({"world_size": 2}, "ddp_broadcast_buffers=False"),
        ({"fp16": True, "max_grad_norm": 0.0}, "set max_grad_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            callback.on_train_begin(SimpleNamespace(**allowed | settings), state, None)
