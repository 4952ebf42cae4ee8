-- A module of Lmod for an hpctrain that is installed once for all users, from a clone:
--
--     python3.11 -m venv /opt/hpctrain/VERSION && /opt/hpctrain/VERSION/bin/pip install .
--     cp examples/recipes/module.lua /opt/modulefiles/hpctrain/VERSION.lua
--     module load hpctrain
--
-- Checked by a test: Lmod loads and unloads it, and the command is found.
help([[Train PyTorch models across the nodes of this cluster: hpctrain guide]])
whatis("Name: hpctrain")
whatis("Version: " .. myModuleVersion())
whatis("Description: PyTorch training over MPI")

local prefix = pathJoin("/opt/hpctrain", myModuleVersion())

-- The MPI of the site, which knows its network; mpi4py finds it by LD_LIBRARY_PATH:
-- depends_on("openmpi")

prepend_path("PATH", pathJoin(prefix, "bin"))
pushenv("VIRTUAL_ENV", prefix)
-- A disk that each node has for itself, for copies of data sets:
-- setenv("HPCTRAIN_STAGE_DIR", "/local/scratch")
