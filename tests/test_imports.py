import subprocess
import sys


def test_the_web_side_never_loads_mlx() -> None:
    code = "import sys, gnomon.engine.api, gnomon.serve, gnomon.chat, gnomon.hub; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
