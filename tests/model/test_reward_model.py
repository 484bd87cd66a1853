"""Reward models score as transformers does one by one, read what they are said to read, and are refused with a fix."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from rlctl.errors import RlctlError, UsageError
from rlctl.experience.rows import Row
from rlctl.experience.segments import RequestKey
from rlctl.model.digest import tensors_digest
from rlctl.model.loading import load_model
from rlctl.model.reward.base import RewardModel
from rlctl.model.reward.loading import load_classifier, load_tokenizer
from rlctl.model.reward.local import LocalRewardModel
from rlctl.model.reward.reading import Reader
from rlctl.model.reward.scorer import ResponseScorer
from rlctl.tasks.base import Sample, Task, TaskOptions
from rlctl.tasks.builtin_models import builtin_model_path
from tests.model.tiny_reward import actor_tokenizer, save_reward_model

CHAT = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}+{% else %}={% endif %}{% endfor %}"


class Prompts(Task):
    """Two prompts, the second a chat."""

    name = digest = "prompts"
    chats = True

    @classmethod
    def create(cls, name: str, options: TaskOptions) -> "Prompts":
        return cls()

    @property
    def size(self) -> int:
        return 2 if self.chats else 1

    def sample(self, index: int) -> Sample:
        messages = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
        messages.append({"role": "user", "content": "5"})
        return Sample(index, "1-2" if index == 0 else "5", "7", messages=messages if index else None)

    def held_out(self, n: int) -> list[Sample]:
        return []

    def score(self, sample: Sample, response_text: str) -> float:
        return 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward") / "rm")


def local(folder: Path, *, dtype: str = "float32", output: int | None = None, budget: int = 64) -> LocalRewardModel:
    model = load_classifier(str(folder), dtype=dtype, output=output, trust_remote_code=False)
    return LocalRewardModel(model, output=output, micro_batch_tokens=budget)


def one_by_one(folder: Path, sequences: list[list[int]], output: int = 0) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.array([model(torch.tensor([ids])).logits[0, output].item() for ids in sequences])


def random_sequences(vocab: int) -> list[list[int]]:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(rng.randint(1, 40))] for _ in range(17)]


def bert(folder: Path) -> Path:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=3
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "output"),
    [
        (save_reward_model, None),
        (lambda folder: save_reward_model(folder, pad=False), None),
        (lambda folder: save_reward_model(folder, outputs=3), 2),
        (bert, 1),
    ],
    ids=["causal", "without-padding-token", "several-outputs", "encoder"],
)
def test_batches_are_scored_as_each_sequence_alone(make: Callable[[Path], Path], output: int, tmp_path: Path) -> None:
    where = make(tmp_path / "rm")
    model = local(where, output=output)
    sequences = random_sequences(20)
    scores = model.scores(sequences)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, one_by_one(where, sequences, output or 0), atol=2e-5)
    assert (model.scores(sequences) == scores).all()


def test_bfloat16_is_near_and_no_weight_ever_changes(folder: Path) -> None:
    sequences = random_sequences(20)
    model = load_classifier(str(folder), dtype="bfloat16", output=None, trust_remote_code=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    before = tensors_digest(model.named_parameters())
    scores = LocalRewardModel(model, output=None, micro_batch_tokens=64).scores(sequences)
    assert tensors_digest(model.named_parameters()) == before
    expected = one_by_one(folder, sequences)
    assert np.abs(scores - expected).max() < 0.1 * max(1.0, np.abs(expected).max())


def rows(*responses: tuple[int, str, bool]) -> list[Row]:
    """Rows of (prompt number, response text, ended by a stop token)."""
    tokenizer, made = actor_tokenizer(), []
    for place, (group, text, ended) in enumerate(responses):
        ids = tokenizer.encode(text) + [tokenizer.eos_token_id] * ended
        key, prompt = RequestKey(group, place), tokenizer.encode("1-2")
        made.append(Row(key, group, prompt, ids, 0.0, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int64)))
    return made


def reader(own: object, wanted: str = "auto", *, chats: bool = True, longest: int | None = None) -> Reader:
    policy, task = actor_tokenizer(), Prompts()
    task.chats = chats
    return Reader(
        wanted,  # type: ignore[arg-type]
        own=own, policy=policy, stop_ids=(policy.eos_token_id,), embeds=len(policy), longest=longest, task=task,
    )  # fmt: skip


def other_tokenizer(*, template: bool) -> object:
    tokenizer = actor_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.chat_template = CHAT if template else None
    return tokenizer


def test_one_vocabulary_reads_the_policys_tokens() -> None:
    found = reader(actor_tokenizer())
    assert found.form == "tokens"
    batch = rows((0, "5", True), (1, "67", False))
    assert found.read(batch, {0: 0, 1: 1}) == ([row.prompt_ids + row.response_ids for row in batch], 0)
    cut, count = reader(actor_tokenizer(), longest=5).read(batch, {0: 0, 1: 1})
    assert cut == [(row.prompt_ids + row.response_ids)[-5:] for row in batch]
    assert count == sum(row.length > 5 for row in batch)


def test_another_vocabulary_reads_chats_by_its_own_template_or_text() -> None:
    batch = rows((0, "5", True), (1, "67", False))
    own = other_tokenizer(template=True)
    found = reader(own)
    assert found.form == "chat"
    ids, _ = found.read(batch, {0: 0, 1: 1})
    assert [own.decode(sequence) for sequence in ids] == ["1-2=5+", "3=4+5=67+"]  # type: ignore[attr-defined]
    # A conversation: two turns with an observation between them.
    talk = rows((0, "567", True))[0]
    talk.turns, talk.observations = [(0, 1), (2, 4)], ["8"]
    ids, _ = found.read([talk], {0: 0})
    assert own.decode(ids[0]) == "1-2=5+8=7+"  # type: ignore[attr-defined]
    plain = other_tokenizer(template=False)
    ids, _ = reader(plain, chats=False).read([talk], {0: 0})
    assert plain.decode(ids[0][:-1]) == "1-2587"  # type: ignore[attr-defined]
    found = reader(plain, chats=False)
    assert found.form == "text"
    ids, _ = found.read(rows((0, "5", True), (0, "67", False)), {0: 0})
    end = plain.eos_token_id  # type: ignore[attr-defined]
    assert ids == [[*plain.encode("1-25"), end], plain.encode("1-267")]  # type: ignore[attr-defined]


def test_a_conversation_is_read_turn_by_turn() -> None:
    (row,) = rows((0, "5", True))
    policy, own = actor_tokenizer(), other_tokenizer(template=True)
    ids = [*row.response_ids, *policy.encode("a+3"), *policy.encode("8"), policy.eos_token_id]
    none = np.zeros(0, np.bool_)
    talk = dataclasses.replace(row, response_ids=ids, turns=[(0, 2), (5, 7)], observations=["a+3"], mask=none)
    found, _ = reader(own).read([talk], {0: 0})
    assert own.decode(found[0]) == "1-2=5+a+3=8+"  # type: ignore[attr-defined]
    assert reader(actor_tokenizer()).read([talk], {0: 0})[0] == [row.prompt_ids + ids]


@pytest.mark.parametrize(
    ("own", "wanted", "match"),
    [
        (other_tokenizer(template=True), "tokens", "vocabulary is not the policy's"),
        (other_tokenizer(template=False), "chat", "has no chat template"),
        (other_tokenizer(template=False), "text", "prompts are chats"),
        (None, "auto", "has no tokenizer"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_fix(own: object, wanted: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        reader(own, wanted)
    assert caught.value.where is not None and caught.value.where.startswith("reward_model.")
    assert caught.value.fix


def test_a_model_that_is_no_classifier_is_refused(tmp_path: Path, folder: Path) -> None:
    causal = builtin_model_path("cycle-tiny")
    with pytest.raises(UsageError, match=r"has no weights for score\.weight: scores would be random"):
        local(Path(str(causal)))
    # Nor does a classifier pass for a language model; its body is enough for a critic.
    with pytest.raises(UsageError, match=r"has no weights for lm_head\.weight"):
        load_model(str(folder), trust_remote_code=False)
    load_model(str(folder), trust_remote_code=False, head=False)
    several = save_reward_model(tmp_path / "several", outputs=2)
    for output, where, match in ((None, several, "2 outputs"), (2, several, "2 is none"), (1, folder, "1 is none")):
        with pytest.raises(UsageError, match=match) as caught:
            local(where, output=output)
        assert caught.value.where == "reward_model.output"
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    assert load_tokenizer(str(tmp_path / "bare"), trust_remote_code=False) is None


def test_a_score_that_is_no_number_names_its_prompt() -> None:
    class Broken(RewardModel):
        def scores(self, sequences):  # type: ignore[no-untyped-def]
            return np.array([1.0] * (len(sequences) - 1) + [np.nan], np.float32)

    scorer = ResponseScorer(Broken(), reader(actor_tokenizer()))
    with pytest.raises(RlctlError, match=r"score of prompt 1, sample 1 is nan") as caught:
        scorer.scores(rows((0, "5", True), (1, "67", False)), {0: 0, 1: 1})
    assert caught.value.where == "reward_model.path"
