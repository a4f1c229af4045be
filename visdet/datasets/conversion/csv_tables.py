"""Reading CSV tables with a line for each box."""

import csv
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath

from .source import Picture, Source, checked_box, counted, files_below, split_of, text_of

_COLUMNS = {
    "image": ("image", "filename", "image_path", "file", "path", "file_name", "image_id"),
    "label": ("label", "class", "name", "category", "class_name"),
    "xmin": ("xmin", "x1"),
    "ymin": ("ymin", "y1"),
    "xmax": ("xmax", "x2"),
    "ymax": ("ymax", "y2"),
}
_SPLITS = ("split", "subset", "set")
_SIZES = (("width", "image_width", "img_width"), ("height", "image_height", "img_height"))


def read_csv(source: Source) -> Iterator[Picture]:
    """Yield the pictures of all tables. A column of splits outranks the name of the table."""
    for file in files_below(source.root, "*.csv"):
        with counted(source.left_out.others, file):
            yield from _pictures(file, source)


def _pictures(file: Path, source: Source) -> Collection[Picture]:
    lines = text_of(file).splitlines()
    rows = csv.DictReader(lines, restval="", delimiter=max(",;\t", key="".join(lines[:1]).count))
    header = {column.strip().lower(): column for column in rows.fieldnames or ()}

    def column_of(names: Collection[str]) -> str | None:
        return next((header[name] for name in names if name in header), None)

    columns = {key: column_of(names) for key, names in _COLUMNS.items()}
    lacking = [key for key, column in columns.items() if column is None]
    if lacking:
        raise ValueError(f"there is no column {', '.join(lacking)}; the header is {', '.join(header)}")
    sizes = [column_of(names) for names in _SIZES]
    split_column = column_of(_SPLITS)
    table_split = source.table_split(file)
    pictures: dict[tuple[str, str], Picture] = {}
    for number, row in enumerate(rows, start=2):
        image, label, *sides = (row[column].strip() for column in columns.values())  # type: ignore[index]
        given = row[split_column] if split_column else ""
        said = split_of(PurePath(given))
        key = (image, said)
        if key not in pictures:
            pictures[key] = Picture(source.picture(image, file, table_split), said or table_split)
            if given and not said:
                unknown = f"images whose {split_column} in {file} is neither train nor val nor test"
                source.left_out.remarks[unknown].append(f"{image}: {given}")
        picture = pictures[key]
        with counted(source.left_out.boxes, f"line {number} of {file}"):
            if None not in sizes:
                width, height = (float(row[column] or 0) for column in sizes)  # type: ignore[index]
                picture.size = (width, height)
            if any(sides):  # An image without boxes has a row without numbers.
                corners = [side.replace(",", ".") for side in sides]
                picture.boxes.append(checked_box(label, corners))
    return pictures.values()
