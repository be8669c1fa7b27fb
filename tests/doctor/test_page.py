"""docs/doctor.md has a row per check, as the code says it.  Write it:  python -m tests.doctor.test_page"""

from __future__ import annotations

from pathlib import Path

from dask_gpurt.doctor.registry import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"


def table() -> str:
    rows = [f"| {c.id} | {c.name} | {c.looks_at} | {c.fails_when} | {c.remedy} |" for c in CHECKS]
    return "\n".join(["| id | name | looks at | fails or warns | remedy |", "|---|---|---|---|---|", *rows])


def test_the_page_has_all_checks() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table(), "python -m tests.doctor.test_page"
    for check in CHECKS:
        assert check.looks_at
        assert check.remedy
        assert check.fails_when.startswith(("fail: ", "warn: "))


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
