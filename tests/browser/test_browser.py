"""What the other browser tests stand on: there is a browser, it runs scripts, and it has no network."""

from __future__ import annotations


def test_a_page_without_network_runs_its_scripts_and_reaches_nobody(offline, tmp_path):
    file = tmp_path / "page.html"
    file.write_text("<p id=a></p><script>document.getElementById('a').textContent = 6 * 7</script>")
    assert offline.open(file).inner_text("#a") == "42"
    assert offline.page.evaluate("fetch('http://192.0.2.1/').then(() => 'reached', () => 'cut off')") == "cut off"
