from cuboid.mesh.layout import Range, cut


def blocks_of(rows: int, q: int) -> list[Range]:
    return [cut(rows, q, i) for i in range(q)]
