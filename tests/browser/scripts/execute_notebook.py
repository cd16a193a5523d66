"""Execute the cells on standard input in a kernel, and print what each of them showed, as JSON.

A program of its own: what the libraries of notebooks leave open ends with it.
"""

from __future__ import annotations

import json
import sys

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook


class Client(NotebookClient):
    def process_message(self, msg, cell, cell_index):
        page = msg["content"].get("data", {}).get("text/html")
        if page is not None:
            pages[cell_index].append(page)
        return super().process_message(msg, cell, cell_index)


if __name__ == "__main__":
    codes = json.load(sys.stdin)
    pages = [[] for _ in codes]
    notebook = new_notebook(cells=[new_code_cell(code) for code in codes])
    Client(notebook, timeout=float(sys.argv[2]), resources={"metadata": {"path": sys.argv[1]}}).execute()
    json.dump({"outputs": [cell.outputs for cell in notebook.cells], "pages": pages}, sys.stdout)
