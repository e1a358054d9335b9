import pytest

from pipelines.platform.garbage_collection import DAY, Rules, RunFacts, decide

NOW = 1_000_000_000.0
RULES = Rules(days=14, failed_days=3, checkpoint_days=2, keep_last=1)


def run(name, state="succeeded", days=0.0, recipe="r", model=None) -> RunFacts:
    return RunFacts(name, recipe, state, NOW - days * DAY, model)


def going(*runs, rules=RULES, aliased=()) -> dict[str, str]:
    return {each.run.name: each.what for each in decide(runs, rules, aliased, NOW)}


@pytest.mark.parametrize(
    ("state", "days", "goes"),
    [
        ("live", 1000, None),
        ("failed", 2.9, None),
        ("failed", 3, "workspace"),
        ("succeeded", 1.9, None),
        ("succeeded", 2, "checkpoints"),
        ("succeeded", 13.9, "checkpoints"),
        ("succeeded", 14, "workspace"),
    ],
)
def test_by_state_and_age(state, days, goes):
    runs = [run("this", state, days), run("newer", days=0)]
    assert going(*runs).get("this") == goes


def test_the_last_that_succeeded_of_each_recipe_stay_however_old():
    runs = [
        run("a-old", days=90, recipe="a"),
        run("a-last", days=80, recipe="a"),
        run("a-failed", "failed", days=70, recipe="a"),
        run("b-last", days=90, recipe="b"),
    ]
    assert going(*runs) == {
        "a-old": "workspace",
        "a-last": "checkpoints",
        "a-failed": "workspace",
        "b-last": "checkpoints",
    }


def test_all_of_an_aliased_models_run_stays_and_of_one_that_took_it_from_the_cache():
    runs = [run("trained", days=90, model="m"), run("cached", days=80, model="m"), run("newer")]
    assert going(*runs, aliased={"m"}) == {}
    assert going(*runs) == {"trained": "workspace", "cached": "workspace"}


def test_what_changed_within_the_hour_stays_whatever_the_rules_say():
    nothing_kept = Rules(days=0, failed_days=0, checkpoint_days=0, keep_last=0)
    runs = [
        run("just now", days=0.9 / 24),
        run("failed now", "failed"),
        run("before", days=1.1 / 24),
    ]
    assert going(*runs, rules=nothing_kept) == {"before": "workspace"}


def test_the_reason_says_what_and_when():
    (decision,) = decide([run("this", "failed", 5)], RULES, (), NOW)
    assert decision.why == "failed 5 days ago"
