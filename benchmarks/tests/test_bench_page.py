"""The page on speed, and what other pages quote of it, are what the stored runs say."""

from dissensus_bench import page


def test_the_page_is_what_the_records_say():
    """After `make results` this passes; a number typed into the page by hand does not last."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `make results`"


def test_the_readme_quotes_the_records():
    readme = (page.ROOT / "README.md").read_text(encoding="utf-8")
    quoted = page.headlines()
    assert f"| {quoted['small loop']} | {quoted['small']} captured |" in readme
    assert f"| {quoted['loop']} (one model: {quoted['one']}) | {quoted['five']} compiled |" in readme
    assert f"| 1 | {quoted['scores']} the speed |" in readme


def test_an_aim_that_the_record_misses_is_said_to_be_missed():
    _, results = page.load(page.GPU)
    verdicts = {aim: verdict for aim, _, verdict in page.aims(results)}
    assert verdicts["20 MLPs at most 0.06 ms, 300 × the loop"] == "reached"
    (small,) = [each for each in results if each["what"].startswith(page.SMALL)]
    small["sides"][page.OURS]["ms"] = 0.07
    verdicts = {aim: verdict for aim, _, verdict in page.aims(results)}
    assert verdicts["20 MLPs at most 0.06 ms, 300 × the loop"] == "not reached"
