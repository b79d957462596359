"""Build the site from README.md and docs/*.md: `python docs/build.py [FOLDER]`, into .site by default.

Pages link to files of the repository by path, so links work on GitHub as well. Every linked file (code, measurements,
CONTRIBUTING.md) becomes a page of the site too. `docs/fields.md` is written first, from the code; it is not committed. A
warning (a dead link, a dead anchor, an unknown name) ends the build with exit status 1.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
KEPT = (".md", ".svg", ".png", ".json", ".gz")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*[ ]*$", re.MULTILINE | re.DOTALL)


def page_of(path: Path) -> PurePosixPath:
    """Return the page of a file or a folder of the repository."""
    if path == ROOT / "README.md":
        return PurePosixPath("index.md")
    page = PurePosixPath(path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix())
    if path.is_dir():
        return page / "index.md"
    return page if page.suffix in KEPT else page.with_name(f"{page.name}.md")


class Pages:
    """Folder of pages that the site is built from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead: list[str] = []
        self._done: set[Path] = set()

    def add(self, path: Path) -> None:
        """Add the page of a file or a folder, and the pages that it links to."""
        if path in self._done:
            return
        self._done.add(path)
        page = self.folder / page_of(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            page.write_text(self._listing(path), encoding="utf-8")
        elif path.suffix == ".md":
            page.write_text(self._with_links(path), encoding="utf-8")
        elif path.suffix in KEPT:
            shutil.copy(path, page)
        else:
            code = path.read_text(encoding="utf-8")
            page.write_text(f"# {path.relative_to(ROOT)}\n\n````{path.suffix[1:]}\n{code}\n````\n", encoding="utf-8")

    def _listing(self, folder: Path) -> str:
        """Return links to the files of a folder, pages by their titles."""
        lines = [f"# {folder.relative_to(ROOT)}", ""]
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] not in "._"):
            self.add(path)
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            title = first.removeprefix("# ") if path.suffix == ".md" else path.name
            lines.append(f"- [{title}]({page_of(path).name})")
        return "\n".join(lines)

    def _with_links(self, path: Path) -> str:
        """Return the text of a page with links to pages in place of links to files. The build checks their anchors."""

        def link(match: re.Match[str]) -> str:
            target = (path.parent / match[1]).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                self.dead.append(f"{path.relative_to(ROOT)}: {match[1]} does not exist")
                return match[1]
            self.add(target)
            return "../" * (len(page_of(path).parts) - 1) + str(page_of(target))

        text, end, parts = path.read_text(encoding="utf-8"), 0, []
        for code in FENCE.finditer(text):
            parts += [LINK.sub(link, text[end : code.start()]), code[0]]
            end = code.end()
        return "".join([*parts, LINK.sub(link, text[end:])])


def write_fields(page: Path) -> None:
    """Write the page of all recipe fields."""
    command = [sys.executable, "-m", "agentrl", "fields", "--markdown"]
    page.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout, encoding="utf-8")


def main(site: Path) -> int:
    """Build the site; return the exit status."""
    shutil.rmtree(site, ignore_errors=True)
    settings = (DOCS / "zensical.toml").read_text(encoding="utf-8").replace("@ROOT@", str(ROOT))
    if "fields.md" in settings:
        write_fields(DOCS / "fields.md")
    pages = Pages(site / "pages")
    for path in [ROOT / "README.md", DOCS / "design", *sorted(DOCS.rglob("*.md"))]:
        pages.add(path)
    if pages.dead:
        print(*pages.dead, sep="\n", file=sys.stderr)
        return 1
    shutil.copy(DOCS / "site.css", pages.folder)
    (site / "zensical.toml").write_text(settings, encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=site, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".site"))
