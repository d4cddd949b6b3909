"""Prints the key as a table."""
import os
import sys

import yaml

path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "key.yaml")
key = yaml.safe_load(open(path))
rows = [("id", "family", "model", "must", "true names", "acts", "what")]
for f in key["faults"]:
    rows.append((f["id"], f["family"], f["model"], "yes" if f["must_name"] else "",
                 ", ".join(f["true_names"]) or "(unexplained)",
                 str((f.get("acts") or {}).get("size", "-")), f["what"]))
w = [max(len(r[i]) for r in rows) for i in range(5)] + [44]
for r in rows:
    print("  ".join([r[i].ljust(w[i]) for i in range(5)] + [r[5][:44].ljust(w[5]), r[6]]))
print(len(key["faults"]), "faults")
