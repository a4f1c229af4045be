"""Files of JSON, as tests read and write them."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text())


def write_json(path: str | Path, content: Any) -> None:
    Path(path).write_text(json.dumps(content))
