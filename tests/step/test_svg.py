"""The elements of pictures: well formed whatever they say."""

from __future__ import annotations

from xml.etree import ElementTree

from headrace.step.svg import GROUND, bar, opening, text


def test_a_picture_of_all_elements() -> None:
    drawn = (
        opening(300, 200) + bar(1, 2, 30, 4, "#123456", "a <label> & more") + text(5, 6, "a < b") + "</svg>\n"
    )
    root = ElementTree.fromstring(drawn)
    ground, one, words = list(root)
    assert root.attrib["viewBox"] == "0 0 300 200"
    assert ground.attrib == {"width": "300", "height": "200", "fill": GROUND}
    assert one.attrib == {"x": "1.0", "y": "2.0", "width": "30.00", "height": "4", "fill": "#123456"}
    assert [label.text for label in one] == ["a <label> & more"]
    assert words.text == "a < b"


def test_what_is_not_said_leaves_nothing_behind() -> None:
    assert text(5, 6, "") == ""
    assert "title" not in bar(1, 2, 3, 4, "#123456")
    assert "opacity" not in bar(1, 2, 3, 4, "#123456")
    assert 'fill-opacity="0.5"' in bar(1, 2, 3, 4, "#123456", opacity=0.5)
