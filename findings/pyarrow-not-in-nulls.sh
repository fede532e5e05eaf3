#!/usr/bin/env bash
# In a filter of Parquet files, `!=` drops rows without a value and `not in` keeps them.
#
# Versions: pyarrow 26.0.1, Python 3.11; seen on 28 November 2026.
# Seen:     `filters=[("lang", "!=", "en")]` returns the rows "de" and "fr"; `filters=[("lang", "not in", ["en"])]`
#           returns "de", null and "fr". Equally for numbers, and for `pyarrow.dataset`'s expressions that these stand
#           for.
# Expected: "not equal to en" and "not one of (en)" mean the same. The documentation of `read_table` lists both
#           operators side by side and says nothing of nulls; in SQL (the script asks SQLite) both drop the row.
# Matters:  whoever adds a second value to a filter and therefore turns `!=` into `not in` lets all unlabelled rows
#           into the data, and the other way round loses them, with no error.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q pyarrow==26.0.1

env/bin/python - <<'PYTHON'
import sqlite3
import sys

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

pq.write_table(pa.table({"lang": ["en", "de", None, "fr"], "size": [1, 2, None, 4]}), "rows.parquet")
field = ds.field("lang")
filters = {
    'lang != "en"': [("lang", "!=", "en")],
    'lang not in ["en"]': [("lang", "not in", ["en"])],
    "size != 1": [("size", "!=", 1)],
    "size not in [1]": [("size", "not in", [1])],
    'field != "en"': field != "en",
    '~field.isin(["en"])': ~field.isin(["en"]),
}
seen = {name: pq.read_table("rows.parquet", filters=what).column("lang").to_pylist() for name, what in filters.items()}
for name, rows in seen.items():
    print(f"{name:22} {rows}")

database = sqlite3.connect(":memory:")
database.execute("create table rows (lang text)")
database.executemany("insert into rows values (?)", [("en",), ("de",), (None,), ("fr",)])
for condition in ("lang <> 'en'", "lang not in ('en')"):
    answer = database.execute(f"select lang from rows where {condition}")
    print(f"SQL {condition:18} {[lang for (lang,) in answer]}")

described = [["de", "fr"], ["de", None, "fr"]] * 3
sys.exit(0 if list(seen.values()) == described else f"Changed: expected {described}")
PYTHON
