"""An HTML page as its tags and its text."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Remembers every tag and its attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)
