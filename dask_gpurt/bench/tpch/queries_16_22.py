"""TPC-H queries 16 to 22, each as a dask.dataframe user would write it. See `tables` for the types."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

from dask_gpurt.bench.tpch.tables import FLOAT, Tables, decimal, order_by, revenue, totals


def q16(t: Tables) -> Any:
    """Parts/supplier relationship."""
    part = t.part
    part = part[
        (part.p_brand != "Brand#45")
        & ~part.p_type.str.startswith("MEDIUM POLISHED")
        & part.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])
    ][["p_partkey", "p_brand", "p_type", "p_size"]]
    complaints = t.supplier[t.supplier.s_comment.str.contains("Customer.*Complaints", regex=True)]
    complaints = complaints.assign(bad=complaints.s_suppkey)[["s_suppkey", "bad"]]
    offers = t.partsupp[["ps_partkey", "ps_suppkey"]].merge(
        complaints, left_on="ps_suppkey", right_on="s_suppkey", how="left"
    )
    offers = offers[offers.bad.isna()][["ps_partkey", "ps_suppkey"]]
    joined = offers.merge(part, left_on="ps_partkey", right_on="p_partkey")
    keys = ["p_brand", "p_type", "p_size"]
    distinct = joined[[*keys, "ps_suppkey"]].drop_duplicates()
    out = distinct.groupby(keys).agg(supplier_cnt=("ps_suppkey", "count")).reset_index()
    return order_by(out, ["supplier_cnt", *keys], [False, True, True, True])


def q17(t: Tables) -> Any:
    """Small-quantity-order revenue."""
    part = t.part[(t.part.p_brand == "Brand#23") & (t.part.p_container == "MED BOX")][["p_partkey"]]
    li = t.lineitem[["l_partkey", "l_quantity", "l_extendedprice"]]
    li = li.merge(part, left_on="l_partkey", right_on="p_partkey")
    stats = li.groupby("l_partkey").l_quantity.agg(["sum", "count"]).reset_index()
    stats = stats.rename(columns={"sum": "total", "count": "lines"})
    li = li.merge(stats, on="l_partkey")
    # quantity < 0.2 * total / lines, with the division moved over so that it stays exact
    small = li[decimal(li.l_quantity * 5, 18, 2) * li.lines < li.total]
    price = totals(small[["l_extendedprice"]])
    return price.assign(avg_yearly=price.l_extendedprice.astype(FLOAT) / 7)[["avg_yearly"]]


def q18(t: Tables) -> Any:
    """Large volume customer.

    Dask puts the groups of fifteen partitions into one. At scale 1 stock takes half as long that way; at 10 it fits.
    At 30 stock's workers of 4 GiB die of it, as there is a group for every fourth row.
    """
    apart = {"split_out": True} if t.scale > 10 else {}
    sums = t.lineitem.groupby("l_orderkey").agg({"l_quantity": "sum"}, **apart).reset_index()
    sums = sums.rename(columns={"l_quantity": "sum_qty"})
    large = sums[sums.sum_qty > 300]
    orders = t.orders[["o_orderkey", "o_custkey", "o_orderdate", "o_totalprice"]]
    orders = orders.merge(large, left_on="o_orderkey", right_on="l_orderkey")
    out = orders.merge(t.customer[["c_custkey", "c_name"]], left_on="o_custkey", right_on="c_custkey")
    out = out[["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum_qty"]]
    return order_by(out, ["o_totalprice", "o_orderdate"], [False, True], 100)


def q19(t: Tables) -> Any:
    """Discounted revenue."""
    li = t.lineitem
    li = li[li.l_shipmode.isin(["AIR", "AIR REG"]) & (li.l_shipinstruct == "DELIVER IN PERSON")]
    li = li.assign(revenue=revenue(li))[["l_partkey", "l_quantity", "revenue"]]
    part = t.part[t.part.p_brand.isin(["Brand#12", "Brand#23", "Brand#34"])]
    part = part[["p_partkey", "p_brand", "p_size", "p_container"]]
    j = li.merge(part, left_on="l_partkey", right_on="p_partkey")

    def case(brand: str, containers: list[str], quantity: int, size: int) -> Any:
        return (
            (j.p_brand == brand)
            & j.p_container.isin(containers)
            & (j.l_quantity >= quantity)
            & (j.l_quantity <= quantity + 10)
            & (j.p_size >= 1)
            & (j.p_size <= size)
        )

    wanted = (
        case("Brand#12", ["SM CASE", "SM BOX", "SM PACK", "SM PKG"], 1, 5)
        | case("Brand#23", ["MED BAG", "MED BOX", "MED PKG", "MED PACK"], 10, 10)
        | case("Brand#34", ["LG CASE", "LG BOX", "LG PACK", "LG PKG"], 20, 15)
    )
    return totals(j[wanted][["revenue"]])


def q20(t: Tables) -> Any:
    """Potential part promotion."""
    part = t.part[t.part.p_name.str.startswith("forest")][["p_partkey"]]
    offers = t.partsupp[["ps_partkey", "ps_suppkey", "ps_availqty"]].merge(
        part, left_on="ps_partkey", right_on="p_partkey"
    )
    li = t.lineitem[(t.lineitem.l_shipdate >= date(1994, 1, 1)) & (t.lineitem.l_shipdate < date(1995, 1, 1))]
    li = li[["l_partkey", "l_suppkey", "l_quantity"]].merge(part, left_on="l_partkey", right_on="p_partkey")
    sold = li.groupby(["l_partkey", "l_suppkey"]).agg({"l_quantity": "sum"}).reset_index()
    sold = sold.rename(columns={"l_quantity": "sold"})
    offers = offers.merge(sold, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
    offers = offers[offers.ps_availqty * 2 > offers.sold][["ps_suppkey"]].drop_duplicates()
    nation = t.nation[t.nation.n_name == "CANADA"][["n_nationkey"]]
    supplier = t.supplier[["s_suppkey", "s_name", "s_address", "s_nationkey"]]
    supplier = supplier.merge(nation, left_on="s_nationkey", right_on="n_nationkey")
    out = supplier.merge(offers, left_on="s_suppkey", right_on="ps_suppkey")
    return order_by(out[["s_name", "s_address"]], ["s_name"])


def q21(t: Tables) -> Any:
    """Suppliers who kept orders waiting.

    The two correlated EXISTS become two counts per order: how many suppliers it has, and how many of them were late.
    An order counts for its late supplier if it has others and none of the others was late.

    Without ``split_out`` Dask puts the groups of ten partitions into one, and those of fifteen. There is nearly a group
    per row: at scale 30 that is more than a worker of 4 GiB has, and at scale 1 it takes longer.
    """
    orders = t.orders[t.orders.o_orderstatus == "F"][["o_orderkey"]]
    li = t.lineitem[["l_orderkey", "l_suppkey", "l_commitdate", "l_receiptdate"]]
    li = li.assign(late=(li.l_receiptdate > li.l_commitdate).astype("int64[pyarrow]"))
    li = li[["l_orderkey", "l_suppkey", "late"]].merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    per_supplier = li.groupby(["l_orderkey", "l_suppkey"]).agg({"late": "sum"}, split_out=True).reset_index()
    per_supplier = per_supplier.assign(is_late=(per_supplier.late > 0).astype("int64[pyarrow]"))
    per_order = per_supplier.groupby("l_orderkey")
    per_order = per_order.agg({"l_suppkey": "count", "is_late": "sum"}, split_out=True).reset_index()
    per_order = per_order.rename(columns={"l_suppkey": "suppliers", "is_late": "late_suppliers"})
    only = per_order[(per_order.suppliers > 1) & (per_order.late_suppliers == 1)][["l_orderkey"]]
    guilty = per_supplier[per_supplier.is_late == 1].merge(only, on="l_orderkey")
    nation = t.nation[t.nation.n_name == "SAUDI ARABIA"][["n_nationkey"]]
    supplier = t.supplier[["s_suppkey", "s_name", "s_nationkey"]]
    supplier = supplier.merge(nation, left_on="s_nationkey", right_on="n_nationkey")[["s_suppkey", "s_name"]]
    guilty = guilty.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    out = guilty.groupby("s_name").agg(numwait=("late", "sum")).reset_index()
    return order_by(out, ["numwait", "s_name"], [False, True], 100)


def q22(t: Tables) -> Any:
    """Global sales opportunity."""
    customer = t.customer[["c_custkey", "c_phone", "c_acctbal"]]
    customer = customer.assign(cntrycode=customer.c_phone.str.slice(0, 2))
    customer = customer[customer.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    positive = customer[customer.c_acctbal > Decimal("0.00")].c_acctbal
    rich = customer[customer.c_acctbal.astype(FLOAT) > positive.astype(FLOAT).mean()]
    orders = t.orders[["o_custkey"]].drop_duplicates().assign(has_orders=1)
    rich = rich.merge(orders, left_on="c_custkey", right_on="o_custkey", how="left")
    rich = rich[rich.has_orders.isna()]
    out = rich.groupby("cntrycode").agg(numcust=("c_acctbal", "count"), totacctbal=("c_acctbal", "sum")).reset_index()
    return order_by(out, ["cntrycode"])
