"""The losses over pairs, and their gradients, beside those of TRL."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.core.errors import UserError
from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
from pipelines.loading.dataloader import IGNORED, Batch
from pipelines.models.config import DecoderConfig
from pipelines.models.pretrained import load_weights, save_pretrained
from pipelines.models.transformer import Transformer
from pipelines.parallel.layout import resolve_layout
from pipelines.parallel.mesh import build_mesh
from pipelines.recipe.preference_section import Preference
from pipelines.recipe.recipe import Recipe
from pipelines.recipe.recipe_files import load_recipe
from pipelines.training.preference import PairLoss

LENGTH = 32
END = torch.tensor([256])
# Of each pair: the prompt's tokens, those of the chosen answer, those of the rejected one.
PAIRS = [(3, 5, 2), (2, 4, 7)]
MESH = build_mesh(resolve_layout(Recipe(name="pairs").parallel, 1), torch.device("cpu"))


def loss_of(**preference: Any) -> PairLoss:
    return PairLoss(Preference(**preference), most_documents=2 * len(PAIRS) + 1, mesh=MESH)


def conversations() -> list[tuple[Tensor, int]]:
    """The ids of the chosen and the rejected conversation of each pair, and the prompt's length.

    Answers end with the end of the text, which also is before all documents of a sample but the
    first.
    """
    draw = torch.Generator().manual_seed(0)
    found = []
    for prompt, *answers in PAIRS:
        asked = torch.randint(250, (prompt,), generator=draw)
        for answer in answers:
            said = torch.randint(250, (answer - 1,), generator=draw)
            found.append((torch.cat((asked, said, END)), prompt))
    return found


def packed() -> Batch:
    """All conversations in one sample, and padding."""
    tokens, targets = torch.zeros(LENGTH + 1, dtype=torch.int64), torch.full((LENGTH,), IGNORED)
    documents = torch.full((LENGTH,), 2 * len(PAIRS), dtype=torch.int32)
    start = 0
    for number, (ids, prompt) in enumerate(conversations()):
        stop = start + len(ids)
        tokens[start:stop] = ids
        targets[start + prompt - 1 : stop - 1] = ids[prompt:]
        documents[max(0, start - 1) : stop - 1] = number
        start = stop
    return Batch(tokens[:-1][None], targets[None], documents[None])


def decoder(folder: Path) -> Transformer:
    shape = DecoderConfig(
        layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=257, context_length=LENGTH
    )
    model = Transformer(shape)
    load_weights(model, folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with a tokenizer: the one that is trained, and its reference."""
    made = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"model-{seed}")
        shape = DecoderConfig(
            layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab_size=257, context_length=32
        )
        model = Transformer(shape)
        model.init_weights(seed)
        save_tokenizer(byte_tokenizer(), folder)
        save_pretrained([model], folder, 256, None)
        made.append(folder)
    return made


def ours(
    folders: list[Path], loss: PairLoss, missing: Sequence[int] = ()
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of all pairs, and the gradients; some conversations have no targets."""
    model, reference = map(decoder, folders)
    batch, kept = packed(), []
    hidden = torch.isin(batch.documents_BS, torch.tensor(missing))
    batch = batch._replace(targets_BS=batch.targets_BS.masked_fill(hidden, IGNORED))

    def keep(nats_BS: Tensor, _: Tensor, documents_BS: Tensor, __: Any) -> Tensor:
        kept.append(loss.of_conversations(-nats_BS, documents_BS))
        return nats_BS.sum()

    reference.objective = keep
    with torch.no_grad():
        reference(batch.inputs_BS, batch.documents_BS, batch.targets_BS)
    model.objective = loss
    known = kept[0] if loss._by.needs_reference else None
    mean = model(batch.inputs_BS, batch.documents_BS, batch.targets_BS, known) / loss.counted(batch)
    mean.backward()
    return mean.item(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("preference", "theirs"),
    [
        ({"kind": "dpo", "beta": 0.3}, "sigmoid"),
        ({"kind": "dpo", "beta": 2.0, "length_normalised": True}, "sigmoid_norm"),
        ({"kind": "ipo", "beta": 0.7}, "ipo"),
    ],
)
def test_losses_with_a_reference_are_those_of_trl(
    preference: dict[str, Any], theirs: str, folders: list[Path], tmp_path: Path
) -> None:
    from trl import DPOConfig, DPOTrainer

    trainer = trainer_of_trl(DPOTrainer, DPOConfig, folders, tmp_path, preference["beta"], theirs)
    expected = trainer._compute_loss(trainer.model, inputs_of_trl(), False)
    expected.backward()
    check(ours(folders, loss_of(**preference)), expected, trainer.model)


def test_kto_is_trls_at_its_reference_point(folders: list[Path], tmp_path: Path) -> None:
    from trl import KTOConfig, KTOTrainer

    trainer = trainer_of_trl(KTOTrainer, KTOConfig, folders, tmp_path, 0.3, "kto")
    inputs = inputs_of_trl()
    # Answers to which the model gives more than its reference does: the point is not 0.
    other = {f"KL_{name}": each.flip(0)[:, 1:] for name, each in inputs.items()}
    label = {"label": torch.tensor([True] * len(PAIRS) + [False] * len(PAIRS))}
    expected = trainer._compute_loss(trainer.model, inputs | other | label, False)
    expected.backward()
    (point,) = trainer._metrics["eval"]["kl"]
    assert point > 0
    loss = loss_of(kind="kto", beta=0.3)
    loss.load_state_dict({"point": point})
    check(ours(folders, loss), expected, trainer.model)


def test_kto_of_labelled_answers_is_trls(folders: list[Path], tmp_path: Path) -> None:
    from trl import KTOConfig, KTOTrainer

    trainer = trainer_of_trl(KTOTrainer, KTOConfig, folders, tmp_path, 0.3, "kto")
    trainer.undesirable_weight = 2.5
    # The chosen answer of the first pair, and the rejected one of the second.
    inputs = {name: each[[0, 3]] for name, each in inputs_of_trl().items()}
    other = {f"KL_{name}": each.flip(0)[:, 1:] for name, each in inputs.items()}
    label = {"label": torch.tensor([True, False])}
    expected = trainer._compute_loss(trainer.model, inputs | other | label, False)
    expected.backward()
    loss = loss_of(kind="kto", beta=0.3, weight_of_rejected=2.5)
    loss.load_state_dict({"point": trainer._metrics["eval"]["kl"][0]})
    check(ours(folders, loss, missing=[1, 2]), expected, trainer.model)


def test_figures_of_labelled_answers_are_means_over_those_of_each_label() -> None:
    loss, batch = loss_of(kind="kto", beta=0.5), packed()
    targets_BS = batch.targets_BS.masked_fill(batch.documents_BS == 1, IGNORED)
    nats = (targets_BS != IGNORED).float()
    loss(nats, targets_BS, batch.documents_BS, torch.zeros(1, loss.conversations))
    assert loss.counted(batch._replace(targets_BS=targets_BS)) == 3
    loss.end_step(1)
    loss.end_window()
    assert loss.figures == {
        "pairs_chosen_right": 0.5,  # the answer without another one became less likely
        "reward_margin": pytest.approx(-0.5 * (5 + 4) / 2 + 0.5 * 7),
        "reward_of_chosen": pytest.approx(-0.5 * (5 + 4) / 2),
        "reward_of_rejected": pytest.approx(-0.5 * 7),
    }


def test_ktos_reference_point_is_how_much_likelier_answers_became_in_the_step_before() -> None:
    loss, batch = loss_of(kind="kto", beta=0.5), packed()
    counted = (batch.targets_BS != IGNORED).float()

    def step(nats: float) -> float:
        known = torch.zeros(1, loss.conversations)
        found: Tensor = loss(nats * counted, batch.targets_BS, batch.documents_BS, known)
        loss.end_step(1)
        return found.item()

    first = step(-1.0)  # of 5, 2, 4 and 7 tokens
    assert loss.state_dict() == {"point": 18 / 4}
    assert step(1.0) != pytest.approx(first)
    assert loss.state_dict() == {"point": 0}  # answers became less likely
    assert step(-1.0) == pytest.approx(first)
    loss.end_window()
    assert loss.figures["reward_margin"] == pytest.approx(0.5 * (5 + 4 - 2 - 7) / 3 / 2)


def trainer_of_trl(
    trainer: Any, config: Any, folders: list[Path], into: Path, beta: float, kind: str
) -> Any:
    """One of TRL's trainers, of the first model with the second one as its reference."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(256)
    settings = {"train_sampling_strategy": "sequential"} if kind == "kto" else {}
    return trainer(
        model,
        reference,
        config(
            str(into),
            loss_type=kind,
            beta=beta,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
        processing_class=tokenizer,
    )


def inputs_of_trl() -> dict[str, Tensor]:
    """The chosen conversations and then the rejected ones, a row each."""
    first, *others = conversations()
    found = [first, *((torch.cat((END, ids)), prompt + 1) for ids, prompt in others)]
    rows = [*found[::2], *found[1::2]]
    longest = max(len(ids) for ids, _ in rows)
    inputs = torch.zeros(3, len(rows), longest, dtype=torch.int64)
    for row, (ids, prompt) in enumerate(rows):
        inputs[0, row, : len(ids)] = ids
        inputs[1, row, : len(ids)] = 1
        inputs[2, row, prompt : len(ids)] = 1
    return dict(zip(("input_ids", "attention_mask", "completion_mask"), inputs, strict=True))


def check(found: tuple[float, dict[str, Tensor]], expected: Tensor, model: Any) -> None:
    """Compare loss and gradients."""
    loss, gradients = found
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    of_theirs = dict(model.named_parameters())
    for name, gradient in gradients.items():
        their = of_theirs.get(f"model.{name}", of_theirs.get(name)).grad
        if name.startswith("embed"):  # transformers gives the token that pads no gradient
            gradient, their = gradient[: END.item()], their[: END.item()]
        torch.testing.assert_close(gradient, their, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_trls(smoothing: float) -> None:
    from trl.experimental.cpo import CPOTrainer

    loss = loss_of(kind="simpo", beta=2.0, margin=0.6, label_smoothing=smoothing)
    settings = SimpleNamespace(
        alpha=0.0,
        beta=2.0,
        simpo_gamma=0.6,
        loss_type="simpo",
        label_smoothing=smoothing,
        accelerator=SimpleNamespace(device="cpu"),
    )
    compare(loss, lambda chosen, rejected: CPOTrainer.cpo_loss(settings, chosen, rejected)[0])


def test_orpo_is_trls() -> None:
    from trl.experimental.orpo import ORPOTrainer

    settings = SimpleNamespace(beta=0.2, accelerator=SimpleNamespace(device="cpu"))

    def theirs(chosen: Tensor, rejected: Tensor) -> Tensor:
        return -chosen - ORPOTrainer.odds_ratio_loss(settings, chosen, rejected)[0]

    compare(loss_of(kind="orpo", beta=0.2), theirs)


def compare(loss: PairLoss, theirs: Any) -> None:
    """Beside a function of the mean log-likelihoods of chosen and rejected answers."""
    batch = packed()
    nats = torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(3)) * 4
    counted = (batch.targets_BS != IGNORED).float()
    mine, other = (nats.clone().requires_grad_() for _ in range(2))
    found = loss(mine * counted, batch.targets_BS, batch.documents_BS, None)
    means = [
        -(other * counted * (batch.documents_BS == number)).sum()
        / (counted * (batch.documents_BS == number)).sum()
        for number in range(2 * len(PAIRS))
    ]
    expected = theirs(torch.stack(means[::2]), torch.stack(means[1::2])).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    of_mine, of_other = (
        torch.autograd.grad(*each)[0] for each in ((found, mine), (expected, other))
    )
    torch.testing.assert_close(of_mine, of_other, rtol=1e-5, atol=1e-6)


def test_figures_are_means_over_pairs() -> None:
    loss, batch = loss_of(kind="dpo", beta=0.5), packed()
    nats = (batch.targets_BS != IGNORED).float()
    loss(nats, batch.targets_BS, batch.documents_BS, torch.zeros(1, loss.conversations))
    loss.end_step(1)
    loss.end_window()
    assert loss.counted(batch) == len(PAIRS)
    assert loss.figures == {
        "pairs_chosen_right": 0.5,  # a shorter answer is likelier here
        "reward_margin": pytest.approx(0.5 * ((2 - 5) + (7 - 4)) / 2),
        "reward_of_chosen": pytest.approx(-0.5 * (5 + 4) / 2),
        "reward_of_rejected": pytest.approx(-0.5 * (2 + 7) / 2),
    }


def test_padding_and_halves_of_pairs_change_nothing() -> None:
    loss, batch = loss_of(kind="orpo"), packed()
    alone = batch.targets_BS.masked_fill(batch.documents_BS == 3, IGNORED)
    nats = torch.ones(1, LENGTH, requires_grad=True)
    counted = nats * (alone != IGNORED)
    loss(counted, alone, batch.documents_BS, None).backward()
    assert loss.counted(batch._replace(targets_BS=alone)) == 1
    assert nats.grad is not None
    assert nats.grad.isfinite().all()
    assert (nats.grad[batch.documents_BS >= 2] == 0).all()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("preference.margin=1", "margin is for simpo; kind is dpo"),
        ("preference.label_smoothing=0.5", "less than 0.5"),
    ],
)
def test_a_setting_of_another_loss_is_refused(values: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe("debug", ["preference.kind=dpo", values])
