"""The script `condense`, which answers `--help` and `--version` without torch.

`import condense` loads torch and transformers to register its models. The parsers of the commands are modules of that
package which need neither. So the script makes the package without running it, and a command runs it when it begins:
see `condense.cli.command`. In every other process `import condense` is as it always was.
"""

import importlib.util
import sys


def main() -> None:
    spec = importlib.util.find_spec("condense")
    assert spec is not None
    sys.modules["condense"] = importlib.util.module_from_spec(spec)
    from condense.cli.main import main

    main()
