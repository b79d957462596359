"""The small shell says and does what `sh` does, where it does anything; and it ends, whatever it is asked."""

import time

import psutil
import pytest

from agentrl_envs.sandboxes import bubblewrap
from agentrl_envs.sandboxes.bubblewrap import BubblewrapConfig
from agentrl_envs.sandboxes.files import FileSandbox
from agentrl_envs.sandboxes.mini_shell import MiniShellConfig

WHY_NOT = bubblewrap._problem(BubblewrapConfig())
FILES = {
    "a.txt": "pear\napple\nfig\napple\n",
    "b.txt": "10 x\n9 y\n\n100 z\n",
    "data/sales.csv": "item,amount\nfig,3\npear,12\nfig,4.5\n",
    "data/app.log": "ok\nERROR one\nok [1]\nerror two\nERROR three\n",
    "data/deep/note.md": "see a.b\n",
    "logs/x.log": "1\n",
    "logs/y.log": "2\n",
    "logs/z.tmp": "",
    "odd name.txt": "spaced\n",
}
SAME = """
cat a.txt b.txt
echo one  two "three  four" 'five*' \\*
echo -n x
ls
ls -1 logs
ls logs/*.log
echo logs/* *.txt logs/[xy].log nothing*
cat "odd name.txt"
head -n 2 a.txt
head -2 a.txt
tail -n 1 a.txt
tail -n +3 a.txt
wc -l a.txt
wc -l < a.txt
cat a.txt | wc -l
grep apple a.txt
grep -c apple a.txt
grep -n ERROR data/app.log
grep -i error data/app.log
grep -v ok data/app.log
grep -l ERROR data/app.log a.txt
grep -r -l fig . | sort
grep -h o data/app.log
grep '^o.*\\]$' data/app.log
grep -F '[1]' data/app.log
grep 'a[.]b' data/deep/note.md
grep 'ap*le' a.txt
grep nothing a.txt
grep -c nothing a.txt || echo none
sort a.txt
sort -u a.txt
sort -r a.txt
sort -n b.txt
sort -t, -k2 -n data/sales.csv
sort a.txt | uniq
sort a.txt | uniq -d
cut -d, -f2 data/sales.csv
cut -d, -f1,2 data/sales.csv
awk -F, '{print $1}' data/sales.csv
awk -F, 'NR>1 {s+=$2} END {print s}' data/sales.csv
awk '{print $2}' b.txt
sed 's/p/P/' a.txt
sed 's/p/P/g' a.txt
sed 's/[aeiou]/<&>/g' a.txt
sed 's/x*/-/g' a.txt
find . -name '*.log' | sort
find logs -type f | sort
find . -type d | sort
find data -name 'd*' | sort
mkdir new && mv a.txt new && cat new/a.txt
mkdir -p p/q/r; touch p/q/r/s; find p | sort
cp a.txt c.txt; cat c.txt
cp -r data copy; find copy | sort
mv logs/x.log logs/x.txt && ls logs
mv logs old; ls old
rm logs/*.tmp; ls logs
rm -r data; ls
rm -f nothing && echo fine
find . -name '*.tmp' -delete; ls logs
echo 1 > n.txt; echo 2 >> n.txt; cat n.txt
sed -i 's/ok/fine/' data/app.log; cat data/app.log
cat a.txt > d.txt && sort d.txt > e.txt; cat e.txt
cd data && ls && pwd
cd data; cd ..; cd data/deep; cat note.md
grep -l 1 logs/* | xargs cat
ls logs | xargs echo
true && echo yes || echo no
false && echo yes || echo no
false; echo after
cat nothing 2> /dev/null || echo missing
echo a#b # a comment
echo x > /dev/null
ls -p
ls ./*.txt
echo ./logs/*.log logs/../*.txt /work/logs/*.log nothing/../*.txt
rm ./logs/*.tmp; ls logs
cat /worklogs/x.log
sort -t, -k2n data/sales.csv
sort -t, -k2,2nr data/sales.csv
sort -k1nr b.txt
""".strip().split("\n")
SAME += ["false &&\necho one", "true &&\n\necho one", "false ||\necho one\necho two"]
REFUSED = (
    *(
        "echo $HOME",
        "echo `ls`",
        "echo $(ls)",
        "for f in *; do ls; done",
        "ls &",
        "cat <<E",
        "(ls)",
        'echo "$x"',
        "cat '",
        "| ls",
    ),
    *(
        "ls |",
        "echo >",
        "python3 -c 1",
        "sed 5q a.txt",
        "find . -exec ls",
        "awk 'BEGIN{while(1){}}'",
        "grep '[a' a.txt",
        "grep '[[:alpha:]]' a.txt",
        "grep -e a -e b a.txt",
        "sed -e s/a/b/ -e s/b/c/ a.txt",
        "sort -k1.2 a.txt",
        "mv -n a.txt b.txt",
        "true && ; ls",
    ),
)


def filled(sandbox: FileSandbox) -> FileSandbox:
    for path, content in FILES.items():
        sandbox.write(path, content)
    return sandbox


@pytest.mark.skipif(bool(WHY_NOT), reason=f"bubblewrap: {WHY_NOT}")
@pytest.mark.parametrize("line", SAME)
def test_it_does_what_a_shell_does(line: str) -> None:
    mini, real = filled(MiniShellConfig().build()), filled(BubblewrapConfig().build())
    expected = real.exec(line, language="sh")
    result = mini.exec(line, language="sh")
    assert (result.output, result.returncode) == (expected.output, expected.returncode)
    assert {p: mini.read(p) for p in mini.paths()} == {p: real.read(p) for p in real.paths()}


@pytest.mark.parametrize("line", REFUSED)
def test_what_it_does_not_know_is_said(line: str) -> None:
    sandbox = filled(MiniShellConfig().build())
    result = sandbox.exec(line, language="sh")
    assert result.returncode != 0
    assert result.output
    assert sandbox.paths() == sorted(FILES)


@pytest.mark.parametrize(
    "line",
    [
        *("cat /etc/passwd", "cat ../../../etc/passwd", "cat /work/../etc/passwd", "cd / && ls", "ls /etc", "ls /proc"),
        *("echo x > /tmp/x", "echo x > ../x", "cp a.txt /etc/a", "mv a.txt ..", "mkdir /x", "rm -r /", "rm -r ."),
        *("find / -name passwd", "grep -r root /etc"),
    ],
)
def test_nothing_leads_out(line: str) -> None:
    sandbox = filled(MiniShellConfig().build())
    result = sandbox.exec(line, language="sh")
    assert (result.returncode != 0, "root" in result.output.replace("root /etc", "")) == (True, False)
    assert sandbox.paths() == sorted(FILES)


@pytest.mark.parametrize(
    "line",
    [
        "cat long; " * 1500,
        "cat " + "long " * 3000,
        "grep 'a*a*a*a*a*a*a*a*a*b' long",
        "grep '.*.*.*.*.*.*x' long",
        "sed 's/a*/" + "b" * 10_000 + "/g' long",
        "sed 's/a/&&&&&&&&&&&&&&&&/g' long > l2; " + "sed -i 's/a/&&&&&&&&&/g' l2;" * 100,
        "cat long long long > b; " + "cat b b b b > c; cat c c c c > b;" * 50,
        "mkdir " + " ".join(f"d{n}" for n in range(3000)) + "; ls */*/*/*/*",
        "mkdir -p " + "a/" * 5000,
        "cp -r d d/e; " * 500,
        "echo " + "* " * 9000,
        "ls -R " + ". " * 5000,
        "xargs " * 3000,
        "true; " * 3000,
        "find . -name '" + "*a" * 5000 + "'",
        "sort " + "long " * 1000 + "| uniq | sort -n | wc",
    ],
    ids=range(16),
)
def test_it_ends_and_stays_small(line: str) -> None:
    sandbox = MiniShellConfig().build()
    sandbox.write("long", ("a" * 20_000 + "\n") * 10)
    before, begun = psutil.Process().memory_info().rss, time.process_time()
    sandbox.exec(line, language="sh")
    assert time.process_time() - begun < 10
    assert psutil.Process().memory_info().rss - before < 300_000_000


def test_too_much_work_leaves_the_files_as_before() -> None:
    sandbox = MiniShellConfig().build()
    sandbox.write("long", "a" * 50_000)
    result = sandbox.exec("echo x > y; grep 'a*a*a*b' long", language="sh")
    assert (result.timed_out, result.output, sandbox.paths()) == (True, "sh: stopped, too much work\n", ["long"])
