import nbformat
import pytest

from epiviz.parameters import ParameterError, check_parameters, defaults, profile_parameters

CELL = """\
model: str = "smollm2-135m"  # a name, a hub id or a folder
budget: int = 128  # slots per layer and KV head
share: float = 0.25  # of the budget
others: list[str] = ["random"]  # compared with
plain: bool = False  # no colours
sizes: list[int] = [1, 2]  # of the boxes
"""


def write_notebook(path, cell=CELL):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell, metadata={"tags": ["parameters"]})]
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def notebook(tmp_path):
    return write_notebook(tmp_path / "01_tiny.ipynb")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"budget": 64, "share": 1, "plain": True}, {"budget": 64, "share": 1.0, "plain": True}),
        ({"budget": "64", "share": "0.5", "plain": "True"}, {"budget": 64, "share": 0.5, "plain": True}),
        ({"others": "epikv, random", "sizes": "3,4"}, {"others": ["epikv", "random"], "sizes": [3, 4]}),
        ({"others": ["full"], "sizes": ("5",)}, {"others": ["full"], "sizes": [5]}),
        ({"others": ""}, {"others": []}),
    ],
)
def test_values_take_the_annotated_types(notebook, given, expected):
    assert check_parameters(notebook, given) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"budget": 1.5},
        {"budget": True},
        {"budget": "many"},
        {"share": "x"},
        {"share": True},
        {"plain": 1},
        {"model": 3},
        {"others": 3},
        {"others": [1]},
        {"sizes": "a"},
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(notebook, given):
    (name, value), *_ = given.items()
    with pytest.raises(ParameterError, match=f"01_tiny.ipynb: parameter '{name}'") as caught:
        check_parameters(notebook, given)
    assert repr(value) in str(caught.value)


def test_an_unknown_name_is_refused_with_the_nearest(notebook):
    with pytest.raises(
        ValueError, match=r"no parameter 'bugdet'; did you mean 'budget'\? known: budget, model, others"
    ):
        check_parameters(notebook, {"bugdet": 64})


def test_defaults_are_the_literals_of_the_cell(notebook, tmp_path):
    assert defaults(notebook)["others"] == ["random"]
    derived = write_notebook(tmp_path / "derived.ipynb", "budget: int = 2\nbuffer: int = budget // 2  # derived\n")
    with pytest.raises(ParameterError, match="'buffer' = budget // 2 is no literal"):
        defaults(derived)


def test_an_annotation_that_cannot_be_checked_is_refused(tmp_path):
    odd = write_notebook(tmp_path / "odd.ipynb", "budget: Fraction = 1  # a share\n")
    with pytest.raises(ParameterError, match="must be Fraction"):
        check_parameters(odd, {"budget": 1})


def write_profile(folder, text, name="quick"):
    (folder / "profiles").mkdir(exist_ok=True)
    (folder / "profiles" / f"{name}.yaml").write_text(text)


def test_a_profile_gives_what_a_notebook_has_and_its_own_block_wins(notebook, tmp_path):
    write_profile(tmp_path, "default: {model: a, budget: 64, seed: 1}\n01_tiny: {budget: 32, share: 0.5}\n")
    assert profile_parameters(notebook, "quick") == {"model": "a", "budget": 32, "share": 0.5}
    other = write_notebook(tmp_path / "02_other.ipynb", "seed: int = 0  # of the draws\n")
    assert profile_parameters(other, "quick") == {"seed": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: {bugdet: 64}", "every notebook 'bugdet'; did you mean 'budget'"),
        ("01_tiny: {seed: 1}", "no parameter 'seed'"),
        ("01_tini: {budget: 1}", "block '01_tini' for no notebook; did you mean '01_tiny'"),
        ("default: {budget: much}", "must be int"),
        ("budget: 64", "maps 'default' and notebook stems"),
        ("", "maps 'default' and notebook stems"),
    ],
)
def test_a_wrong_profile_is_refused(notebook, tmp_path, text, message):
    write_profile(tmp_path, text)
    with pytest.raises(ParameterError, match=message):
        profile_parameters(notebook, "quick")


def test_a_missing_profile_or_notebook_is_named(notebook, tmp_path):
    write_profile(tmp_path, "default: {}")
    with pytest.raises(FileNotFoundError, match=r"no profile 'quik'.*did you mean 'quick'"):
        profile_parameters(notebook, "quik")
    with pytest.raises(FileNotFoundError, match="no notebook"):
        check_parameters(tmp_path / "none.ipynb", {})
