"""Tables of strangers: what cannot be read is told in one line, with the lines of the file."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError, PhalanxError
from phalanx.lab.csv_rows import read_rows, seen_table

REQUIRED, NUMBERS = ("name", "speed"), ("speed", "size")


def read(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_rows(path, required=REQUIRED, numbers=NUMBERS)


def test_a_cell_is_a_number_or_empty_and_keeps_its_line(tmp_path):
    rows = read(tmp_path / "t.csv", 'name,speed,size,else\na, 1e3 ,,x\n"b\nc",2,3,\n')
    assert [(row.line, row.get("name"), row.number("speed")) for row in rows] == [
        (2, "a", 1000.0),
        (4, "b\nc", 2.0),
    ]
    assert rows[0].number("size") is None and rows[1].count("size") == 3
    assert rows[0].get("no such column") == ""


@pytest.mark.parametrize("cell", ["fast", "inf", "-1", "1,5", "0x10", "8-16"])
def test_text_in_a_number_cell_costs_its_own_row_and_is_told(tmp_path, cell):
    whole, broken = read(tmp_path / "t.csv", f'name,speed,size\na,1,\nb,2,"{cell}"\n')
    assert not whole.broken and not whole.unread
    assert broken.broken == (f"size = '{cell}'",) and broken.unread == ["a number in size"]
    assert broken.number("size") is None and broken.number("speed") == 2.0


@pytest.mark.parametrize("cell", ["-", "n/a", "NaN", " null ", "Unknown", "?", "none"])
def test_words_for_nothing_are_nothing(tmp_path, cell):
    (row,) = read(tmp_path / "t.csv", f"name,speed,size\na,1,{cell}\n")
    assert row.get("size") == "" and row.number("size") is None and not row.broken


def test_none_in_a_column_of_words_is_a_word(tmp_path):
    (row,) = read(tmp_path / "t.csv", "name,speed,recompute,zero\na,1,none,nan\n")
    assert (row.get("recompute"), row.get("zero")) == ("none", "")


def test_a_table_without_a_whole_row_is_told_with_line_and_column(tmp_path):
    with pytest.raises(JobError) as error:
        read(tmp_path / "t.csv", "name,speed,size\na,x,\nb,2,8-16\n")
    assert error.value.code == "system/published"
    assert "line 2, speed = 'x'; line 3, size = '8-16'" in error.value.sentence()


def test_many_broken_cells_make_one_sentence(tmp_path):
    lines = "".join(f"a{n},x,\n" for n in range(1000))
    with pytest.raises(JobError) as error:
        read(tmp_path / "t.csv", f"name,speed,size\n{lines}")
    assert "line 2," in error.value.sentence() and "996 more" in error.value.sentence()
    assert "\n" not in error.value.sentence() and len(error.value.sentence()) < 400


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("", "is empty"),
        ("name,speed\n", "no rows"),
        ("name,sped\na,1\n", "lacks the columns speed"),
        (b"\xff\xfe\x00name", "cannot be read"),
        (b"\x1f\x8bbroken", "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_told_in_one_line(tmp_path, content, rule):
    with pytest.raises(JobError) as error:
        read(tmp_path / "t.csv", content)
    assert rule in error.value.sentence() and "\n" not in error.value.sentence()


def test_a_missing_column_names_the_one_that_looks_like_it(tmp_path):
    with pytest.raises(JobError) as error:
        read(tmp_path / "t.csv", "name,sped\na,1\n")
    assert "sped" in str(error.value.legal)


def test_no_file_is_not_an_empty_table(tmp_path):
    with pytest.raises(JobError) as error:
        read_rows(tmp_path / "none.csv", required=REQUIRED, numbers=NUMBERS)
    assert error.value.code == "job/not-found"


def test_a_gzipped_table_reads_as_the_plain_one(tmp_path):
    content = b"name,speed,size\na,1,2\n"
    assert read(tmp_path / "t.csv", content) == read(tmp_path / "t.gz", gzip.compress(content))


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: f"name,speed\n{t}".encode()))
def test_any_bytes_are_rows_or_one_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    try:
        rows = read(path, content)
    except PhalanxError as error:
        assert "\n" not in error.sentence()
    else:
        assert all(value >= 0 for row in rows for value in row.numbers.values())


@pytest.mark.parametrize("name", ["training", "serving"])
def test_the_shipped_tables_are_there(name):
    assert len(read_rows(seen_table(name), required=("source_id",), numbers=())) > 4000
