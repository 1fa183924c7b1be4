"""Pages of reports, parsed strictly with the standard library."""

import json
from html import unescape
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Node:
    """An element of a parsed page."""

    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    @property
    def text(self):
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    @property
    def nodes(self):
        return [child for child in self.children if isinstance(child, Node)]

    def walk(self):
        for child in self.nodes:
            yield child
            yield from child.walk()

    def all(self, tag, class_=None):
        for node in self.walk():
            classes = node.attributes.get("class", "").split()
            if node.tag == tag and (class_ is None or class_ in classes):
                yield node


class Page(HTMLParser):
    """A page; every element must be closed, in order."""

    def __init__(self, html):
        super().__init__()
        self.root = Node("document", [])
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert [node.tag for node in self.open] == ["document"]

    def handle_starttag(self, tag, attrs):
        node = Node(tag, attrs)
        assert len(node.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)

    def tables(self):
        """Return rows of cells by caption."""
        return {
            next(table.all("caption")).text: [row.nodes for row in table.all("tr")]
            for table in self.root.all("table")
        }

    @staticmethod
    def pictures_of(node):
        """Yield caption and Plotly's figure; None where there is nothing to draw."""
        for figure in node.all("figure"):
            specs = [json.loads(script.text) for script in figure.all("script")]
            yield next(figure.all("figcaption")).text, specs[0] if specs else None

    def pictures(self):
        """Return the figures by caption."""
        return dict(self.pictures_of(self.root))


def axes(spec):
    """Return the titles of the axes that have one."""
    titles = [spec["layout"][f"{axis}axis"].get("title", {}).get("text") for axis in "xy"]
    return [unescape(title) for title in titles if title]


def marks(spec):
    """Return (name, x, y, what more is said) of each mark that says its values."""
    return [
        (unescape(trace["name"]), x, y, said)
        for trace in spec["data"]
        if trace.get("hoverinfo") != "skip"
        for x, y, said in zip(
            trace["x"], trace["y"], trace.get("customdata", [None] * len(trace["x"])), strict=True
        )
    ]


def colours(spec):
    """Return the colour of each series by name."""
    return {unescape(t["name"]): t["marker"]["color"] for t in spec["data"] if "name" in t}
