"""The kinds of clause that carry an answer: how contracts write each of them, and how people ask for it.

`{party}` is the party a clause binds, `{other}` the other one, `{value}` the answer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClauseKind:
    """One kind of clause.

    Args:
        name: identifies the kind.
        heading: of the clause, in force or superseded, whichever party it binds.
        value: what sort of answer it has, known to `contract_values.values_of_split`.
        clauses: ways to write it, each with `{value}` exactly once.
        questions: ways to ask for it.
        summary: how a summary tells it.
    """

    name: str
    heading: str
    value: str
    clauses: tuple[str, ...]
    questions: tuple[str, ...]
    summary: str

    @property
    def binds_one_party(self) -> bool:
        """Whether a contract may hold it twice, once for each party."""
        return "{party}" in self.questions[0]


KINDS = (
    ClauseKind(
        name="termination",
        heading="Termination",
        value="days",
        clauses=(
            "{party} may end this agreement at any time by giving {value} of notice in writing.",
            "If {party} wishes to terminate this agreement, notice of {value} has to reach {other} first.",
            "A notice of {value} is needed before {party} can terminate this agreement for convenience.",
        ),
        questions=(
            "How much notice must {party} give to terminate the agreement?",
            "With how much notice can {party} end this agreement?",
            "What is the notice period for termination by {party}?",
        ),
        summary="{party} may terminate with {value} of notice",
    ),
    ClauseKind(
        name="payment",
        heading="Payment",
        value="days",
        clauses=(
            "{party} shall pay every undisputed invoice within {value} of receiving it.",
            "Invoices sent to {party} fall due {value} after their date and are paid by bank transfer.",
            "Payment by {party} is due within {value}, counted from the day the invoice arrives.",
        ),
        questions=(
            "Within what time must {party} pay an invoice?",
            "When are invoices to {party} due for payment?",
            "How long does {party} have to pay invoices?",
        ),
        summary="{party} pays invoices within {value}",
    ),
    ClauseKind(
        name="liability",
        heading="Limit of liability",
        value="amount",
        clauses=(
            "The total liability of {party} under this agreement shall not exceed {value} in any calendar year.",
            "{party} is liable for damage up to {value} and for no more than that.",
            "Whatever the cause, the liability of {party} towards {other} is limited to {value}.",
        ),
        questions=(
            "What is the limit of the liability of {party}?",
            "Up to what sum is {party} liable?",
            "How high is the cap on liability for {party}?",
        ),
        summary="the liability of {party} is limited to {value}",
    ),
    ClauseKind(
        name="insurance",
        heading="Insurance",
        value="amount",
        clauses=(
            "{party} shall keep insurance against third-party claims with cover of at least {value}.",
            "During the term {party} maintains an insurance policy with a sum insured of {value}.",
            "Insurance cover of not less than {value} is taken out by {party} at its own expense.",
        ),
        questions=(
            "What insurance cover does {party} need?",
            "For what sum must {party} be insured?",
            "How much insurance does {party} have to keep?",
        ),
        summary="{party} keeps insurance cover of {value}",
    ),
    ClauseKind(
        name="interest",
        heading="Late payment",
        value="percent",
        clauses=(
            "If {party} is late with a payment, interest of {value} a year is added to what is owed.",
            "Sums that {party} leaves unpaid bear interest at the rate of {value} until they are settled.",
            "{party} owes default interest of {value} on every amount that is overdue.",
        ),
        questions=(
            "What rate of interest does {party} owe on late payments?",
            "What is the default interest for {party}?",
            "How much interest is added when {party} pays late?",
        ),
        summary="{party} owes {value} on late payments",
    ),
    ClauseKind(
        name="discount",
        heading="Discount",
        value="percent",
        clauses=(
            "{party} is granted a discount of {value} on the list price of each order.",
            "A rebate of {value} is credited to {party} at the end of every quarter.",
            "Where the yearly volume is reached, {party} receives a volume discount of {value}.",
        ),
        questions=(
            "What discount is granted to {party}?",
            "How large is the rebate for {party}?",
            "Which discount does {party} receive?",
        ),
        summary="{party} receives a discount of {value}",
    ),
    ClauseKind(
        name="confidentiality",
        heading="Confidentiality",
        value="months",
        clauses=(
            "{party} keeps all confidential information secret for {value} after the end of this agreement.",
            "The duty of confidentiality binds {party} for a further {value} once this agreement is over.",
            "For {value} after termination {party} shall disclose no secret of {other} to anybody.",
        ),
        questions=(
            "How long must {party} keep information confidential?",
            "For how long does the duty of confidentiality bind {party}?",
            "How long is {party} bound to secrecy?",
        ),
        summary="{party} is bound to secrecy for {value}",
    ),
    ClauseKind(
        name="warranty",
        heading="Warranty",
        value="months",
        clauses=(
            "{party} gives a warranty of {value} against defects in material and workmanship.",
            "Defects reported within {value} of acceptance are put right by {party} free of charge under its warranty.",
            "The warranty period that {party} grants is {value} from the day of handover.",
        ),
        questions=(
            "How long is the warranty given by {party}?",
            "What is the warranty period of {party}?",
            "For how long does {party} answer for defects under warranty?",
        ),
        summary="{party} gives a warranty of {value}",
    ),
    ClauseKind(
        name="competition",
        heading="Competition",
        value="months",
        clauses=(
            "{party} shall not compete with {other} for {value} after this agreement has ended.",
            "For a period of {value} {party} refrains from any competing business in the territory.",
            "The ban on competition binds {party} during {value} and lapses after that.",
        ),
        questions=(
            "For how long is {party} barred from competing?",
            "How long does the ban on competition bind {party}?",
            "How long must {party} stay out of competing business?",
        ),
        summary="{party} may not compete for {value}",
    ),
    ClauseKind(
        name="response",
        heading="Support",
        value="hours",
        clauses=(
            "{party} answers a report of a fault within {value} on every working day.",
            "The response time of {party} after a fault has been reported is {value}.",
            "Faults are looked into by {party} no later than {value} after they were reported.",
        ),
        questions=(
            "How quickly must {party} respond to a fault?",
            "What is the response time of {party} for faults?",
            "Within what time does {party} look into a reported fault?",
        ),
        summary="{party} responds to faults within {value}",
    ),
    ClauseKind(
        name="inspection",
        heading="Inspection",
        value="hours",
        clauses=(
            "{party} may inspect the books and premises after announcing the visit {value} ahead.",
            "An inspection by {party} has to be announced {value} before it takes place.",
            "Upon {value} of warning {party} is entitled to audit all records that concern this agreement.",
        ),
        questions=(
            "How long ahead must {party} announce an inspection?",
            "What warning does {party} have to give before an audit?",
            "How early is an inspection by {party} to be announced?",
        ),
        summary="{party} announces inspections {value} ahead",
    ),
    ClauseKind(
        name="deposit",
        heading="Security deposit",
        value="amount",
        clauses=(
            "{party} lodges a security deposit of {value} with the bank of {other} before work begins.",
            "As security for its duties {party} deposits {value} in a blocked account.",
            "The deposit that {party} has to provide amounts to {value} and bears no return.",
        ),
        questions=(
            "How large is the security deposit of {party}?",
            "What deposit does {party} have to provide?",
            "Which sum must {party} deposit as security?",
        ),
        summary="{party} deposits {value} as security",
    ),
    ClauseKind(
        name="penalty",
        heading="Penalty for delay",
        value="amount",
        clauses=(
            "For each week of delay {party} pays a contractual penalty of {value} to {other}.",
            "{party} forfeits a penalty of {value} whenever an agreed milestone is missed.",
            "If {party} causes a delay, a penalty of {value} falls due without any reminder.",
        ),
        questions=(
            "What penalty does {party} pay for a delay?",
            "How high is the contractual penalty for {party}?",
            "Which penalty falls due if {party} is delayed?",
        ),
        summary="{party} pays a penalty of {value} for delay",
    ),
    ClauseKind(
        name="contact",
        heading="Contact person",
        value="person",
        clauses=(
            "{party} appoints {value} as its contact person for all questions of daily business.",
            "Messages to {party} are addressed to {value}, who may accept them on its behalf.",
            "The representative of {party} in all matters of this agreement is {value}.",
        ),
        questions=(
            "Who is the contact person of {party}?",
            "To whom are messages to {party} addressed?",
            "Who represents {party}?",
        ),
        summary="{party} is represented by {value}",
    ),
    ClauseKind(
        name="bank",
        heading="Bank account",
        value="company",
        clauses=(
            "{party} holds the account for this agreement at {value} and tells of any change at once.",
            "Transfers to {party} go to its account with {value}.",
            "The bank of {party} for the purposes of this agreement is {value}.",
        ),
        questions=(
            "At which bank does {party} hold its account?",
            "Where do transfers to {party} go?",
            "What is the bank of {party}?",
        ),
        summary="{party} banks with {value}",
    ),
    ClauseKind(
        name="storage",
        heading="Storage of records",
        value="town",
        clauses=(
            "{party} stores the records of this agreement in {value} and nowhere else.",
            "All data and records in the hands of {party} are kept at its site in {value}.",
            "The archive in which {party} keeps its records is located in {value}.",
        ),
        questions=(
            "Where does {party} store the records?",
            "In which town are the records of {party} kept?",
            "Where is the archive of {party} located?",
        ),
        summary="{party} stores its records in {value}",
    ),
    ClauseKind(
        name="delivery",
        heading="Place of delivery",
        value="town",
        clauses=(
            "Goods for {party} are delivered to its depot in {value} on working days.",
            "{party} takes delivery of all goods in {value} and checks them upon arrival.",
            "The place of delivery for shipments to {party} is {value}.",
        ),
        questions=(
            "Where are goods for {party} delivered?",
            "What is the place of delivery for {party}?",
            "In which town does {party} take delivery?",
        ),
        summary="goods for {party} are delivered to {value}",
    ),
    ClauseKind(
        name="courts",
        heading="Disputes",
        value="town",
        clauses=(
            "Any dispute out of this agreement is decided by the courts of {value} alone.",
            "The parties submit their disputes to the competent court in {value}.",
            "Exclusive jurisdiction over all disputes lies with the judges sitting in {value}.",
        ),
        questions=(
            "Which courts decide disputes?",
            "Where are disputes out of the agreement decided?",
            "Where does jurisdiction over disputes lie?",
        ),
        summary="disputes are decided in {value}",
    ),
    ClauseKind(
        name="start",
        heading="Commencement",
        value="date",
        clauses=(
            "This agreement takes effect on {value}, whenever it was signed.",
            "The duties of both parties begin on {value}.",
            "The date of commencement is {value}, and the first period is counted from it.",
        ),
        questions=(
            "When does the agreement take effect?",
            "On what date do the duties begin?",
            "What is the date of commencement?",
        ),
        summary="the agreement takes effect on {value}",
    ),
    ClauseKind(
        name="expiry",
        heading="Expiry",
        value="date",
        clauses=(
            "This agreement expires on {value} unless both parties extend it in writing.",
            "The last day of the term is {value}.",
            "Without any notice being needed, the agreement runs out on {value}.",
        ),
        questions=(
            "When does the agreement expire?",
            "What is the last day of the term?",
            "On what date does the agreement run out?",
        ),
        summary="it expires on {value}",
    ),
)
