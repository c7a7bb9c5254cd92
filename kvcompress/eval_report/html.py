"""HTML by small functions. Text is escaped where it enters; what has been escaped is a :class:`Markup`."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path


class Markup(str):
    """HTML as it is."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A value as HTML, escaped unless it is HTML already."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))


def element(tag: str, *content: object, **attributes: str) -> Markup:
    """``<tag attributes>content</tag>``; attribute names end in an underscore where Python reserves them."""
    told = "".join(f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{told}>{''.join(map(text, content))}</{tag}>")


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[object]], names: int = 1) -> Markup:
    """A table that screen readers can find their way in.

    Args:
        names: columns at the left that name a row; the others are numbers, set to the right.
    """
    head = element(
        "tr",
        *(element("th", heading, scope="col", class_="name") for heading in headings[:names]),
        *(element("th", heading, scope="col") for heading in headings[names:]),
    )
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, class_="name") for cell in row[1:names]),
            *(element("td", cell) for cell in row[names:]),
        )
        for row in rows
    ]
    whole = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    return element("div", whole, class_="scroll", role="region", tabindex="0", aria_label=caption)


def figure(png: bytes, alternative: str, caption: str) -> Markup:
    """A picture inside the page."""
    data = base64.b64encode(png).decode()
    image = Markup(f'<img src="data:image/png;base64,{data}" alt="{escape(alternative)}">')
    return element("figure", image, element("figcaption", caption))


class Writer:
    """Puts figures into the page and beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def figure(self, name: str, png: bytes, alternative: str, caption: str) -> Markup:
        path = self.folder / f"{name}.png"
        path.write_bytes(png)
        self.files.append(path)
        return figure(png, alternative, caption)


def slug(name: str) -> str:
    """A name as part of the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60]


def page(title: str, *content: object) -> str:
    """A whole document that refers to nothing outside it."""
    head = Markup(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', title)}<style>{_STYLE}</style>"
    )
    body = element("body", element("main", element("h1", title), *content))
    return f"<!DOCTYPE html>\n{element('html', element('head', head), body, lang='en')}\n"


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #202124; background: #fff; margin: 0; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #9aa0a6; }
figure { margin: 1rem 0 0; break-inside: avoid; }
figure img { max-width: 100%; height: auto; }
figcaption { color: #3c4043; font-size: .9rem; max-width: 60rem; }
.scroll { overflow-x: auto; margin: .5rem 0 2rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #dadce0; text-align: right; vertical-align: top; }
thead th { border-bottom: 2px solid #5f6368; }
th[scope=row], .name { text-align: left; }
th[scope=row] { font-weight: normal; }
code, pre { font: .8rem/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: #f1f3f4; padding: .6rem; }
@media print {
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  pre { background: none; border: 1px solid #9aa0a6; }
}
"""
