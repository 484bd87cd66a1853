"""Tasks that need a package: Parquet files, reasoning-gym, mathematics. Runs over them, twice, give equal bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.errors import FindingsError, UnavailableError, UsageError
from rlctl.tasks.cursor import PromptCursor
from rlctl.tasks.packages import need
from rlctl.tasks.registry import load_task
from rlctl.tasks.rewarding import RewardScorer
from tests.trainers.sessions import Run

QUESTIONS = [{"prompt": f"{n}+1*{n + 1}b", "answer": str((n + 1) * (n + 1) % 10)} for n in range(10)]
SLOW = [3, pytest.param(20, marks=pytest.mark.slow)]


def parquet(path: Path, rows: list[dict[str, object]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def jsonl(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_a_parquet_file_are_those_of_a_jsonl_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2"}]
    rows: list[dict[str, object]] = [{"prompt": chat, "truth": {"answer": n, "kind": "a"}} for n in range(3)]
    path = parquet(tmp_path / "d.parquet", rows)
    task = load_task(path, verifier="numeric", answer_field="truth.answer", held_out=0.0)
    assert [task.sample(i).answer for i in range(3)] == ["0", "1", "2"]
    assert (task.sample(0).messages, task.sample(2).source) == (chat, f"{path}:3")


def test_faults_of_a_parquet_file_are_told(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": ""}])
    with pytest.raises(FindingsError) as caught:
        load_task(path, verifier="exact")
    assert [f.where for f in caught.value.findings] == [f"{path}:2"]
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UsageError, match="is no Parquet file"):
        load_task(str(tmp_path / "no.parquet"), verifier="exact")
    with pytest.raises(UsageError, match="No such file"):
        load_task(str(tmp_path / "absent.parquet"), verifier="exact")


def test_a_data_set_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "train.jsonl", QUESTIONS)
    jsonl(tmp_path / "data" / "test.jsonl", [{"prompt": "p", "answer": ""}])
    task, again = (load_task(f"hub:{tmp_path / 'data'}", verifier="numeric", held_out=0.0) for _ in range(2))
    assert [task.sample(i).prompt for i in range(10)] == [row["prompt"] for row in QUESTIONS]
    assert task.digest == again.digest
    with pytest.raises(FindingsError) as caught:
        load_task(f"hub:{tmp_path / 'data'}::test", verifier="numeric")
    assert caught.value.findings[0].where == f"hub:{tmp_path / 'data'}::test:1"
    for name in (f"hub:{tmp_path / 'absent'}", f"hub:{tmp_path / 'data'}::nowhere", "hub:", "hub:a:b:c:d"):
        with pytest.raises(UsageError):
            load_task(name, verifier="numeric")


def test_a_package_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match="needs the package some-package") as caught:
        need("no_such_module.inner", "some-package", "this")
    assert (caught.value.exit_code, "pip install some-package" in str(caught.value)) == (3, True)


def test_reasoning_gym_is_endless_repeatable_and_split_by_question() -> None:
    task, again = (load_task("reasoning_gym:basic_arithmetic", held_out=0.2) for _ in range(2))
    held_out = task.held_out(20)
    train = [sample for _, sample in PromptCursor(task, 7).take(60)]
    assert train == [sample for _, sample in PromptCursor(again, 7).take(60)]
    assert (held_out, len({s.prompt for s in held_out})) == (again.held_out(20), 20)
    assert len({s.prompt for s in train}) > 50
    assert not {s.prompt for s in train} & {s.prompt for s in held_out}
    with pytest.raises(UsageError, match="has no 'composite'"):
        load_task("reasoning_gym:composite")
    with pytest.raises(UsageError, match="did you mean 'basic_arithmetic'"):
        load_task("reasoning_gym:basic_aritmetic")
    with pytest.raises(UsageError, match=r"does not use task\.verifier"):
        load_task("reasoning_gym:basic_arithmetic", verifier="exact")


def test_another_process_makes_the_same_items() -> None:
    task = load_task("reasoning_gym:spell_backward")
    code = (
        "from rlctl.tasks.registry import load_task; print(load_task('reasoning_gym:spell_backward').sample(5).prompt)"
    )
    root = str(Path(__file__).parents[2])
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.strip() == task.sample(5).prompt.strip()


def test_reasoning_gym_scores_in_a_child_process() -> None:
    from rlctl.tasks.gym_items import Place, item

    task = load_task("reasoning_gym:basic_arithmetic")
    sample = task.sample(3)
    right = item(Place(**json.loads(sample.answer)))[1]["answer"]
    with RewardScorer(task, 30.0) as scorer:
        texts = (right, f"<think>1</think>so <answer> {right} </answer>.", "no", "")
        assert [s.reward for s in scorer.score([(sample, text) for text in texts])] == [1.0, 1.0, 0.0, 0.0]


def test_mathematics_is_compared_by_value(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "p", "answer": r"\frac{\sqrt{2}}{2}"}])
    task = load_task(path, verifier="math", held_out=0.0)
    with RewardScorer(task, 30.0) as scorer:
        texts = (r"$\frac{1}{\sqrt{2}}$", r"so \boxed{2^{-1/2}}", "$2$", "", "$" * 1000, r"$\frac{")
        scores = scorer.score([(task.sample(0), text) for text in texts])
    assert [s.reward for s in scores] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("steps", SLOW)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["reasoning_gym", "jsonl", "parquet"])
def test_equal_runs_give_equal_bits(tmp_path: Path, kind: str, steps: int) -> None:
    words = ["task.held_out=0", "task.verifier=numeric"]
    if kind == "reasoning_gym":
        words = ["task.name=reasoning_gym:basic_arithmetic", "task.reward_timeout=60s"]
    elif kind == "jsonl":
        words.append(f"task.name={jsonl(tmp_path / 'd.jsonl', QUESTIONS)}")
    else:
        words.append(f"task.name={parquet(tmp_path / 'd.parquet', [dict(row) for row in QUESTIONS])}")
    runs = [Run(tmp_path / part, *words, steps=steps) for part in "ab"]
    print(kind, "digest", runs[0].digests)
    assert runs[0].digests == runs[1].digests
    assert len(runs[0].metrics) == steps
    assert kind == "reasoning_gym" or any(metrics["grad_norm"] > 0 for metrics in runs[0].metrics)
